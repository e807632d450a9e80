"""What is run: the list of cases for a device, and the check every one of them must pass before the clock starts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anytorch.devices.types import Caps
from anytorch.errors import UsageError, WrongAnswer

if TYPE_CHECKING:
    import torch

WORKLOADS = ("matmul", "bandwidth", "launch", "copies", "transformer")
DTYPES = ("float32", "float16", "bfloat16", "float64")
ALIASES = {"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"}
ALIASES |= {"double": "float64", "fp64": "float64"}

# Largest difference from the fp64 answer, relative to its largest value. Wide enough for the rounding of sums over a
# few thousand products in that dtype; a broken kernel is off by far more.
TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
REDUCED_TOLERANCE = 5e-3  # of float32 when the user has allowed tf32 or bf16 inside float32 products


class Skip(Exception):
    """Raised for a case that does not apply to this device; the text says why."""


@dataclass(frozen=True)
class Bench:
    """The device a case is prepared for."""

    device: torch.device
    caps: Caps
    synchronize: Callable[[], None]
    free: int | None  # bytes
    cache_nbytes: int | None  # the device's last-level cache, when known
    hurried: bool  # less than a second or two for everything: smaller set-ups

    def room_for(self, nbytes: float) -> bool:
        """The bytes a case may use; most of the memory is left to other users of the device."""
        return self.free is None or nbytes <= self.free / 4


@dataclass(frozen=True)
class Prepared:
    """A case with its tensors in place. `answer` and `reference` give the same few numbers, by device and by fp64."""

    run: Callable[[], object]
    answer: Callable[[], torch.Tensor]
    reference: Callable[[], torch.Tensor]
    case: str
    flop: float = 0.0
    nbytes: float = 0.0
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    workload: str
    case: str
    dtype: str
    unit: str  # "TFLOP/s", "GB/s", "µs"
    prepare: Callable[[Bench], Prepared]
    flop: float | None = None  # known beforehand only where the size is given
    skip: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


def check(prepared: Prepared, dtype: str) -> tuple[float, float]:
    """Compare with the fp64 reference; (error, tolerance). Raises WrongAnswer, also for NaN and a wrong shape."""
    got, want = prepared.answer().detach().cpu().double(), prepared.reference().double()
    tolerance = tolerance_of(dtype)
    if got.shape != want.shape:
        raise WrongAnswer(f"{prepared.case}: the answer has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = difference(got, want)
    if not error <= tolerance:  # also catches NaN
        raise WrongAnswer(
            f"{prepared.case}: off by {error:.1e} of the largest value, {tolerance:.0e} is allowed; not timed",
            hint="do not trust this device; run `anytorch test`",
        )
    return error, tolerance


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest wanted value."""
    return float((got - want).abs().max()) / (float(want.abs().max()) or 1.0)


def tolerance_of(dtype: str) -> float:
    import torch

    if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
        return REDUCED_TOLERANCE
    return TOLERANCES[dtype]


# --- understanding the request ----------------------------------------------------------------------------------------


def workload_names(names: Sequence[str] | None) -> tuple[str, ...]:
    if names is None:
        return WORKLOADS
    for name in names:
        if name not in WORKLOADS:
            near = difflib.get_close_matches(name, WORKLOADS, n=1)
            raise UsageError(
                f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}",
                hint=f"did you mean {near[0]!r}?" if near else "",
            )
    return tuple(names)


def dtype_names(names: Sequence[str] | str | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = []
    for name in [names] if isinstance(names, str) else names:
        word = str(name).strip().lower().removeprefix("torch.")
        word = ALIASES.get(word, word)
        if word not in DTYPES:
            near = difflib.get_close_matches(word, [*DTYPES, *ALIASES], n=1)
            raise UsageError(
                f"unknown dtype {name!r}; the benchmark knows {', '.join(DTYPES)}",
                hint=f"did you mean {near[0]!r}?" if near else "",
            )
        found.append(word)
    return tuple(dict.fromkeys(found))


def sizes(name: str, values: Sequence[int]) -> tuple[int, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} are whole numbers above 0, not {value!r}")
    if not values:
        raise UsageError(f"{name} is empty", hint="give at least one number")
    return tuple(values)
