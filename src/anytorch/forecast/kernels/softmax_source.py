# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""One step of a softmax over keys that come block by block, for every attention kernel here."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def online_softmax(score, most, total, AXIS: tl.constexpr):
    """A block's scores, and the highest score and the sum of weights so far → weights, fade, and both of these anew.

    AXIS is the keys'. What was mixed so far is worth `fade` times itself: mixed * fade + weight · value.
    """
    higher = tl.maximum(most, tl.max(score, AXIS))
    fade = tl.exp(most - higher)
    weight = tl.exp(score - (higher if AXIS == 0 else higher[:, None]))
    return weight, fade, higher, total * fade + tl.sum(weight, AXIS)
