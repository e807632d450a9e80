"""Which kernel computes a layer: every usable one is checked against float64, timed, and the result remembered.

Measured per device, format, matrix shape, number of input rows (in classes) and dtype. A kernel that gives a wrong answer
is never timed; the ordinary float multiplication is always among them, so that what is chosen can be compared with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import torch

from anytorch import logs, native
from anytorch._version import __version__
from anytorch.cache import Store
from anytorch.devices.memory import memory, synchronize
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import CacheError, UsageError, WrongAnswer
from anytorch.measured.machine import machine_key
from anytorch.quant.kernels import builtin, cpp, dense, libraries, triton
from anytorch.quant.kernels.base import Kernel, Prepared
from anytorch.quant.tensor import QuantTensor, unpack

log = logs.logger(__name__)

Prefer = Literal["memory", "speed", "invariant"]
ROW_CLASSES = (1, 4, 16, 64, 256)  # a call with m input rows is measured with the next of these
# An accelerator computes thousands of rows at once, where unpacking the weight first costs next to nothing; measuring that
# on a CPU would take longer than it saves.
MANY_ROWS = 4096
BASELINE = dense.KEPT.name
CHECKED_ROWS = 64  # of the weight, against float64
ROUNDS, ROUND_S = 5, 0.02
QUEUED = 20
# Relative to the size of the outputs. "speed" may use kernels that round inputs to bfloat16 (about 3e-3).
TOLERANCE = {"memory": 1e-3, "invariant": 1e-3, "speed": 6e-3}
BFLOAT16_ERROR = 3e-3
HALF_TOLERANCE = 1e-2  # where the inputs have 8 or 11 bits themselves
INT8_INPUT_TOLERANCE = 2e-2
NO_MEMORY = "not enough memory for it"
_store_name = "quant-kernels"


@dataclass(frozen=True)
class Measured:
    """One kernel's result for one case."""

    name: str
    seconds: float | None = None  # None: not usable, or wrong
    error: float | None = None
    extra_nbytes: int = 0
    batch_invariant: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Choice:
    kernel: str
    why: str
    measured: tuple[Measured, ...] = field(default=(), repr=False)

    def seconds(self, name: str) -> float | None:
        return next((one.seconds for one in self.measured if one.name == name), None)

    @property
    def speedup(self) -> float | None:
        """How many times faster than the ordinary float multiplication; below 1: slower."""
        mine, plain = self.seconds(self.kernel), self.seconds(BASELINE)
        return None if not mine or not plain else plain / mine


def kernels(prefer: Prefer) -> list[Kernel]:
    found: list[Kernel] = [*cpp.KERNELS, *triton.KERNELS, *builtin.KERNELS, *dense.KERNELS]
    if prefer == "speed":
        found += libraries.KERNELS
    return found


def row_class(m: int, device: torch.device) -> int:
    sizes = ROW_CLASSES if device.type == "cpu" else (*ROW_CLASSES, MANY_ROWS)
    return next((size for size in sizes if m <= size), sizes[-1])


def choose(
    weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype, m: int, prefer: Prefer = "memory"
) -> Choice:
    """The kernel to use for `m` input rows. Measures on first use; later processes read what was found."""
    if prefer not in get_args(Prefer):
        raise UsageError(f"prefer={prefer!r}: use one of {', '.join(get_args(Prefer))}")
    size = row_class(m, weight.device)
    case = _case(weight, bias, dtype, size, prefer)
    measured = _remembered.get(case)
    if measured is None:
        measured = _recall(case)
    if measured is None:
        measured = measure(weight, bias, dtype, size, prefer)
        if not any(one.refused == NO_MEMORY for one in measured):  # another day there may be enough
            _keep(case, measured)
    _remembered[case] = measured
    return decide(measured, prefer, weight.device)


def decide(measured: Sequence[Measured], prefer: Prefer, device: torch.device) -> Choice:
    """The fastest of the kernels that the preference allows, and why, in words with numbers."""
    right = [one for one in measured if one.seconds is not None]
    if prefer == "speed":
        allowed = [one for one in right if not one.extra_nbytes or _fits(device, one.extra_nbytes)]
    else:
        # Scales in another dtype (one bit per weight at most) are no second copy.
        allowed = [one for one in right if one.extra_nbytes <= _small(right)]
    if prefer == "invariant":
        allowed = [one for one in allowed if one.batch_invariant]
    if not allowed:
        reasons = "; ".join(f"{one.name}: {one.refused}" for one in measured if one.refused)
        raise UsageError(
            f"no kernel here can compute this layer with prefer={prefer!r}: {reasons}",
            hint="use prefer='memory'; batch-invariant kernels need a C++ compiler on the CPU",
        )
    best = min(allowed, key=lambda one: one.seconds or 0.0)
    plain = next((one.seconds for one in right if one.name == BASELINE), None)
    why = f"{_ms(best.seconds)}"
    if plain and best.name != BASELINE:
        ratio = plain / (best.seconds or plain)
        relation = f"{ratio:.2f}× as fast as" if ratio >= 1 else f"{1 / ratio:.2f}× slower than"
        why += f", {relation} float ({_ms(plain)})"
    elif best.name == BASELINE:
        others = [one for one in right if one.name != BASELINE]
        second = min(others, key=lambda one: one.seconds or 0.0) if others else None
        why += f"; no packed kernel is faster here ({second.name}: {_ms(second.seconds)})" if second else ""
    return Choice(best.name, why, tuple(measured))


def _small(measured: Sequence[Measured]) -> int:
    kept = next((one.extra_nbytes for one in measured if one.name == BASELINE), 0)
    return kept // 25


def _fits(device: torch.device, nbytes: int) -> bool:
    free = memory(device).free
    return free is None or nbytes * 4 <= free  # there are more layers than this one


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1e3:.3g} ms"


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype, m: int, prefer: Prefer
) -> tuple[Measured, ...]:
    """Check and time every kernel on this weight with `m` random input rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, weight.columns, generator=generator).to(weight.device, dtype)
    wanted, rows = reference(weight, bias, x)
    results: list[Measured] = []
    ready: list[tuple[Measured, Prepared]] = []
    for kernel in kernels(prefer):
        allowed = tolerance(weight, dtype, prefer)
        refused = kernel.why_not(weight, dtype, m)
        if getattr(kernel, "rounds_inputs", False) and allowed < BFLOAT16_ERROR:
            refused = "rounds inputs to bfloat16; prefer='speed' allows that"
        if refused:
            results.append(Measured(kernel.name, refused=refused))
            continue
        try:
            prepared = kernel.prepare(weight, bias, dtype)
            error = check(kernel.name, prepared.run(x), wanted, rows, allowed)
        except WrongAnswer as exc:
            log.info("%s", exc)
            results.append(Measured(kernel.name, refused=exc.message))
        except Exception as exc:  # noqa: BLE001  (other people's kernels fail in every way; the reason is kept and shown)
            if is_out_of_memory(exc):
                refused = NO_MEMORY
            else:
                refused = f"failed: {type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
            log.info("%s cannot compute %s: %s", kernel.name, weight.format, refused)
            results.append(Measured(kernel.name, refused=refused))
        else:
            found = Measured(kernel.name, None, error, prepared.extra_nbytes, kernel.batch_invariant)
            ready.append((found, prepared))
    seconds = _time([prepared for _, prepared in ready], x)
    results += [
        Measured(one.name, took, one.error, one.extra_nbytes, one.batch_invariant)
        for (one, _), took in zip(ready, seconds, strict=True)
    ]
    return tuple(results)


def tolerance(weight: QuantTensor, dtype: torch.dtype, prefer: Prefer) -> float:
    if weight.format.activations == "int8":
        return INT8_INPUT_TOLERANCE
    return HALF_TOLERANCE if dtype in (torch.float16, torch.bfloat16) else TOLERANCE[prefer]


def reference(weight: QuantTensor, bias: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Some of the outputs in float64 on the CPU, and which rows of the weight they belong to."""
    step = max(1, weight.rows // CHECKED_ROWS)
    rows = torch.arange(0, weight.rows, step)
    full = unpack(weight.to("cpu"), torch.float32).reshape(weight.rows, weight.columns)[rows].double()
    wanted = x.cpu().double() @ full.t()
    if bias is not None:
        wanted = wanted + bias.detach().cpu().double()[rows]
    return wanted, rows


def check(name: str, found: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor, allowed: float) -> float:
    """The relative error of some outputs. Raises WrongAnswer beyond what is allowed."""
    difference = found.cpu().double()[:, rows] - wanted
    error = float(difference.norm() / wanted.norm().clamp(min=1e-30))
    if not error <= allowed:  # not-a-number fails, too
        raise WrongAnswer(f"{name} is off by {error:.2g} of the result's size; {allowed:.2g} is allowed")
    return error


def _time(prepared: Sequence[Prepared], x: torch.Tensor) -> list[float]:
    """The best time of each, in turns, so that a busy moment of the machine hits all of them.

    An accelerator is given several calls to do at once: waiting for it takes longer than a small kernel does.
    """
    best = [float("inf")] * len(prepared)
    calls = 1 if x.device.type == "cpu" else QUEUED
    for number in range(ROUNDS):
        for place, one in enumerate(prepared):
            if number >= 2 and best[place] > ROUND_S:
                continue  # slow ones need no many rounds to be told from fast ones
            queued = 1 if best[place] == float("inf") else max(1, min(calls, int(ROUND_S / best[place])))
            synchronize(x.device)
            start = time.perf_counter()
            for _ in range(queued):
                one.run(x)
            synchronize(x.device)
            best[place] = min(best[place], (time.perf_counter() - start) / queued)
    return best


# --- remembering ------------------------------------------------------------------------------------------------------

_remembered: dict[str, tuple[Measured, ...]] = {}


@lru_cache(maxsize=1)
def _machine() -> str:
    return machine_key()


def _case(weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype, m: int, prefer: Prefer) -> str:
    libraries_too = "all" if prefer == "speed" else "own"
    level = native.level().name if weight.device.type == "cpu" else ""
    parts = (
        __version__,
        _machine(),
        str(weight.device),
        f"{torch.get_num_threads()} threads {level}" if level else "",
        # What was found without a compiler must not outlive the day one is installed.
        "no C++" if level and not cpp.available() else "",
        str(weight.format),
        f"{weight.rows}x{weight.columns}",
        f"m{m}",
        str(dtype).removeprefix("torch."),
        "bias" if bias is not None else "",
        libraries_too,
        *(libraries.versions() if prefer == "speed" else ()),
        triton.version() if not level else "",
        str(tolerance(weight, dtype, prefer)),
    )
    return " ".join(part for part in parts if part)


def _recall(case: str) -> tuple[Measured, ...] | None:
    try:
        stored = Store(_store_name).get(case)
        return None if stored is None else tuple(Measured(**one) for one in stored)
    except (CacheError, TypeError) as exc:
        log.warning("the measured kernels are found out again: %s", exc)
        return None


def _keep(case: str, measured: tuple[Measured, ...]) -> None:
    body: list[dict[str, Any]] = [vars(one).copy() for one in measured]
    try:
        Store(_store_name).put(case, body, keep=1024)
    except CacheError as exc:
        log.warning("the measured kernels are not kept: %s", exc)
