"""Measure each layer's inputs on a few texts in float32, so that rounding loses less.

8-bit activations: a feature ten times larger than its neighbours leaves them a tenth of the 256 steps. Dividing a feature
by a factor, and multiplying its weights by the same factor, changes nothing but the rounding. The factor is the geometric
middle between how large the feature gets and how large its weights are (after SmoothQuant, arXiv 2211.10438).

Weights of 4 and 2 bits: weights of features with large values matter more. They are made larger, so that they are rounded
more finely (after AWQ, arXiv 2306.00978), and a group's range is chosen by the error weighed with the features' squares.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anytorch.errors import InputError, OutOfMemory
from anytorch.text.checkpoints.checkpoint import Floats, Ints
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.text.packed import binding
from anytorch.text.packed.binding import pointer

SAMPLE_TEXTS = 8
SAMPLE_TOKENS = 24
AWARE = 0.5  # 0: all weights alike; 1: in proportion to their inputs
LEAST = 0.05  # of the mean: a feature that the few texts never woke may still wake later


@dataclass(frozen=True)
class Product:
    """One matrix product of a layer: the weights that are stacked in it, (name, rows), and how many inputs they take."""

    which: int
    parts: tuple[tuple[str, int], ...]
    inputs: int
    gated: bool = False

    @property
    def outputs(self) -> int:
        return sum(rows for _, rows in self.parts)


@dataclass(frozen=True)
class Inputs:
    """What was seen of each input of a product: its greatest size, and its mean square."""

    top: Floats
    square: Floats


def calibrated(
    library: ctypes.CDLL, handle: int, ids: Ints, starts: Ints, layer: int, products: Sequence[Product]
) -> dict[int, Inputs]:
    """Run texts through an encoder as it is being loaded; what each product's inputs were, by product.

    Layer by layer, in order, each still in float32; layer -1, before the first, embeds the texts.
    """
    seen = {product.which: np.zeros((2, product.inputs), np.float32) for product in products}
    tops = [pointer(seen.get(which)) for which in (binding.QKV, binding.OUT, binding.UP, binding.DOWN)]
    where = ctypes.c_int(-1)
    texts = (pointer(ids), pointer(starts), len(starts) - 1)
    answer = library.encoder_calibrate(handle, layer, *texts, *tops, ctypes.byref(where))
    if answer == binding.NO_MEMORY:
        raise OutOfMemory(f"no memory to calibrate with {len(ids)} tokens", hint="calibrate with fewer")
    if answer != binding.OK:
        raise InputError(f"the calibration texts do not fit the model (at {where.value})")
    return {which: Inputs(top, total / np.float32(max(len(ids), 1))) for which, (top, total) in seen.items()}


def smooth_bytes(seen: Inputs, heavy: Floats) -> Floats:
    """What each input is multiplied by before it is rounded to 8 bits; `heavy` is the greatest |weight| of each."""
    return _shrink(np.sqrt(_at_least(seen.top) / _at_least(heavy)))


def smooth_groups(seen: Inputs) -> Floats:
    """The same for weights in groups: the larger an input is, the finer its weights are rounded."""
    return _shrink(_at_least(np.sqrt(seen.square)) ** AWARE)


def _at_least(sizes: Floats) -> Floats:
    return np.maximum(sizes, max(LEAST * float(sizes.mean()), 1e-6))


def _shrink(factor: Floats) -> Floats:
    less: Floats = (float(factor.mean()) / factor).astype(np.float32)
    return less


def sample_tokens(spec: EncoderSpec) -> tuple[Ints, Ints]:
    """Tokens drawn evenly from the vocabulary, always the same: for callers that have no texts at hand."""
    length = min(SAMPLE_TOKENS, spec.max_positions)
    # A simple generator of our own: NumPy's may change its stream between versions.
    ids = np.empty(SAMPLE_TEXTS * length, np.int32)
    state = 12345
    for i in range(len(ids)):
        state = (state * 1103515245 + 12345) % 2**31
        ids[i] = (state >> 8) % spec.vocabulary
    return ids, np.arange(0, len(ids) + 1, length, dtype=np.int32)
