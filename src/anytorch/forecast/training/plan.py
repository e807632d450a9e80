"""How to train: a plan, and what each of its numbers may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from anytorch import limits
from anytorch.errors import UsageError

WHOLE = {
    "lookback": limits.WINDOW,
    "horizon": limits.STEPS,
    "epochs": limits.ROUNDS,
    "lora_rank": limits.RANK,
    "seed": limits.SEED,
    **dict.fromkeys(("batch_size", "accumulate"), limits.BATCH),
    **dict.fromkeys(("save_every", "log_every", "stride"), limits.COUNT),
    **dict.fromkeys(("steps_per_epoch", "evaluate_every", "validation_windows", "patience"), limits.COUNT_OR_NONE),
}
# Of every other number: what it may be, and the words for it.
Range = tuple[Callable[[Any], bool], str]
ABOVE_ZERO: Range = (limits.LEARNING_RATE.holds, limits.LEARNING_RATE.words)
SHARE: Range = (lambda value: 0 <= value < 1, "use a number from 0 to below 1")
REAL: dict[str, Range] = {
    **dict.fromkeys(("learning_rate", "epsilon", "clip_norm", "clip"), ABOVE_ZERO),
    **dict.fromkeys(("warm_up", "validation", "test"), SHARE),
    "weight_decay": (limits.DECAY.holds, limits.DECAY.words),
}


@dataclass(frozen=True)
class TrainingPlan:
    """How to train. `batch_size` is per process and per piece of an accumulated step."""

    lookback: int = 90
    horizon: int = 10
    epochs: int = 10
    batch_size: int = 32
    accumulate: int = 1  # pieces that one step's gradient is summed from
    learning_rate: float = 2e-4  # the highest: warm-up before it, a cosine after it
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8  # of AdamW
    clip_norm: float = 3.0  # of the gradient
    warm_up: float = 0.03  # share of all steps
    steps_per_epoch: int = 0  # 0: every window once; else so many steps of them
    evaluate_every: int = 0  # steps; 0: after every epoch
    validation_windows: int = 2000  # evenly spread over the validation period
    patience: int = 0  # evaluations without improvement before it stops; 0: never
    save_every: int = 200  # steps
    log_every: int = 10  # steps
    validation: float = 0.1  # shares of the data, by time; the test period comes last
    test: float = 0.1
    stride: int = 1  # rows from one window's start to the next
    clip: float = 5.0  # of normalised values
    mixed_precision: bool = True  # where the device is faster for it
    seed: int = 100
    lora_rank: int = 0  # 0: all weights are trained

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if why := wrong(field.name, value):
                raise UsageError(f"{field.name}={value!r}: {why}")
            object.__setattr__(self, field.name, plain(field.name, value))


def plain(name: str, value: Any) -> Any:
    """Convert NumPy scalars to Python numbers."""
    if name in WHOLE:
        return int(value)
    if name == "betas":
        return tuple(float(beta) for beta in value)
    return value if name == "mixed_precision" else float(value)


def is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def wrong(name: str, value: Any) -> str:
    """What to use instead of an invalid value of a plan; "" if the value is valid.

    >>> wrong("patience", -1)
    'use a whole number from 0 to 1,000,000,000'
    """
    if name in WHOLE:
        whole = type(value) is not bool and issubclass(type(value), Integral)
        return "" if whole and WHOLE[name].holds(value) else WHOLE[name].words
    if name == "betas":
        pair = isinstance(value, (tuple, list)) and len(value) == 2 and all(is_real(beta) for beta in value)
        return "" if pair and all(0 <= beta < 1 for beta in value) else "use two numbers from 0 to below 1"
    if name == "mixed_precision":
        return "" if isinstance(value, bool) else "use True or False"
    if name not in REAL:
        return ""
    fits, words = REAL[name]
    return "" if is_real(value) and fits(value) else words
