"""Checks of answers that are arrays or tensors: of the right shape and dtype, finite, near the truth, inputs untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from anytorch.errors import WrongAnswer
from anytorch.measured.engine import Check

if TYPE_CHECKING:
    import torch


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The size of the difference, as a share of what is wanted."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def near(
    wanted: Callable[[], torch.Tensor] | torch.Tensor,
    *,
    part: Callable[[Any], torch.Tensor] = lambda answer: answer,
    dtype: torch.dtype | None = None,
    distance: Callable[[torch.Tensor, torch.Tensor], float] = relative,
    inputs: Sequence[torch.Tensor] = (),
) -> Check:
    """A check that gives the error of `part(answer)`, compared with `wanted` in float64 on the CPU.

    Where `wanted` itself is not finite nothing is asked. `dtype` is what the whole answer must have. `inputs` are compared
    with copies made now: a candidate that writes to them spoils the work of whoever called it.
    """
    truth: list[torch.Tensor] = []
    before = [(one, one.detach().clone()) for one in inputs]

    def check(answer: Any) -> float:
        if not truth:
            truth.append((wanted() if callable(wanted) else wanted).detach().cpu().double())
        (right,) = truth
        if dtype is not None and answer.dtype != dtype:
            raise WrongAnswer(f"the answer is {answer.dtype}, not {dtype}")
        found = part(answer).detach().cpu().double()
        if found.shape != right.shape:
            raise WrongAnswer(f"the answer has shape {tuple(found.shape)}, not {tuple(right.shape)}")
        for place, (one, copy) in enumerate(before):
            if not same_bits(one, copy):
                one.copy_(copy)
                raise WrongAnswer(f"it changed its input {place}")
        asked = right.isfinite()
        return distance(found[asked], right[asked]) if bool(asked.any()) else 0.0

    return check


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, with not-a-number equal to itself."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
