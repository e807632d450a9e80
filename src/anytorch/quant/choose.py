"""Which kernel computes a layer: every usable one is checked against float64, timed, and the result remembered.

Measured (`anytorch.measured`) per device, format, matrix shape, number of input rows (in classes) and dtype. The ordinary
float multiplication is always among the candidates, so that what is chosen can be compared with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch

from anytorch import native
from anytorch.counts import counted
from anytorch.devices.memory import memory, synchronize
from anytorch.devices.stopwatch import budget_of, stopwatch_of
from anytorch.errors import UsageError
from anytorch.measured.answers import near
from anytorch.measured.engine import Candidate, Ready, measure
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Trial, Verdict, duration, fastest
from anytorch.quant.kernels import builtin, cpp, dense, libraries, triton
from anytorch.quant.kernels.base import Kernel
from anytorch.quant.tensor import QuantTensor, unpack

Prefer = Literal["memory", "speed", "invariant"]
ROW_CLASSES = (1, 4, 16, 64, 256)  # a call with m input rows is measured with the next of these
# An accelerator computes thousands of rows at once, where unpacking the weight first costs next to nothing; measuring that
# on a CPU would take longer than it saves.
MANY_ROWS = 4096
BASELINE = dense.KEPT.name
CHECKED_ROWS = 64  # of the weight, against float64
ROUNDS, SAMPLE_S = 5, 5e-4
# Relative to the size of the outputs. "speed" may use kernels that round inputs to bfloat16 (about 3e-3).
TOLERANCE = {"memory": 1e-3, "invariant": 1e-3, "speed": 6e-3}
BFLOAT16_ERROR = 3e-3
HALF_TOLERANCE = 1e-2  # where the inputs have 8 or 11 bits themselves
INT8_INPUT_TOLERANCE = 2e-2

_measuring = threading.RLock()


@dataclass(frozen=True)
class KernelChoice:
    kernel: str
    why: str
    measured: tuple[Trial, ...] = field(default=(), repr=False)

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
) -> KernelChoice:
    """The kernel to use for `m` input rows. Measures on first use; later processes read what was found.

    Threads that ask at the same time take turns: measuring beside each other they would find other times, choose other
    kernels, and so give other last bits for the same input.
    """
    if prefer not in get_args(Prefer):
        raise UsageError(f"prefer={prefer!r}: use one of {', '.join(get_args(Prefer))}")
    size = row_class(m, weight.device)
    asked = question(weight, bias, dtype, size, prefer)
    budget_s = budget_of(weight.device)
    verdict = recall(asked, budget_s=budget_s)
    if verdict is None:
        with _measuring:
            verdict = recall(asked, budget_s=budget_s) or remember(_measure(asked, weight, bias, dtype, size, prefer))
    return decide(verdict.trials, prefer, weight.device)


def decide(measured: Sequence[Trial], prefer: Prefer, device: torch.device) -> KernelChoice:
    """The fastest of the kernels that the preference allows, and why, in words with numbers."""
    right = [one for one in measured if one.seconds is not None]
    if prefer == "speed":
        allowed = [one for one in right if not _extra(one) or _fits(device, _extra(one))]
    else:
        # Scales in another dtype (one bit per weight at most) are no second copy.
        most = max(_small(right), min(map(_extra, right), default=0))
        allowed = [one for one in right if _extra(one) <= most and one.name != BASELINE]
    if prefer == "invariant":
        allowed = [one for one in allowed if one.facts.get("batch_invariant")]
    if not allowed:
        reasons = "; ".join(f"{one.name}: {one.refused}" for one in measured if one.refused)
        raise UsageError(
            f"no kernel here can compute this layer with prefer={prefer!r}: {reasons}",
            hint="use prefer='memory'; batch-invariant kernels need a C++ compiler on the CPU",
        )
    best = min(allowed, key=lambda one: one.seconds or 0.0)
    plain = next((one.seconds for one in right if one.name == BASELINE), None)
    why = duration(best.seconds)
    if plain and best.name != BASELINE:
        ratio = plain / (best.seconds or plain)
        relation = f"{ratio:.2f}× as fast as" if ratio >= 1 else f"{1 / ratio:.2f}× slower than"
        why += f", {relation} float ({duration(plain)})"
    elif best.name == BASELINE:
        others = [one for one in right if one.name != BASELINE]
        second = min(others, key=lambda one: one.seconds or 0.0) if others else None
        why += f"; no packed kernel is faster here ({second.name}: {duration(second.seconds)})" if second else ""
    return KernelChoice(best.name, why, tuple(measured))


def _extra(trial: Trial) -> int:
    return int(trial.facts.get("extra_nbytes", 0))


def _small(measured: Sequence[Trial]) -> int:
    return next((_extra(one) for one in measured if one.name == BASELINE), 0) // 25


def _fits(device: torch.device, nbytes: int) -> bool:
    free = memory(device).free
    return free is None or nbytes * 4 <= free  # there are more layers than this one


# --- measuring --------------------------------------------------------------------------------------------------------


def _measure(
    asked: Question, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype, m: int, prefer: Prefer
) -> Verdict:
    """Check and time every kernel on this weight with `m` random input rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, weight.columns, generator=generator).to(weight.device, dtype)
    rows = torch.arange(0, weight.rows, max(1, weight.rows // CHECKED_ROWS))
    allowed = tolerance(weight, dtype, prefer)

    def candidate(kernel: Kernel) -> Candidate:
        def prepare() -> Ready:
            prepared = kernel.prepare(weight, bias, dtype)
            facts = {"extra_nbytes": prepared.extra_nbytes, "batch_invariant": kernel.batch_invariant}
            return Ready(partial(prepared.run, x), facts=facts)

        refused = kernel.why_not(weight, dtype, m)
        if kernel.rounds_inputs and allowed < BFLOAT16_ERROR:
            refused = "rounds inputs to bfloat16; prefer='speed' allows that"
        return Candidate(kernel.name, prepare, refused=refused)

    check = near(
        lambda: reference(weight, bias, x, rows),
        part=lambda answer: answer[:, rows.to(answer.device)] if answer.dim() == 2 else answer,
        dtype=dtype,
        inputs=[x],
    )

    def preferred(trials: Sequence[Trial]) -> tuple[str, str]:
        try:
            choice = decide(trials, prefer, weight.device)
        except UsageError:  # another preference may be met by what was measured
            return fastest(trials)
        return choice.kernel, choice.why

    synchronize(weight.device)  # an error of earlier work, such as an index out of range, is not a candidate's
    return measure(
        asked,
        [candidate(kernel) for kernel in kernels(prefer)],
        check,
        most_error=allowed,
        stopwatch=stopwatch_of(weight.device),
        budget_s=budget_of(weight.device),
        rounds=ROUNDS,
        sample_s=SAMPLE_S,
        decide=preferred,
    )


def tolerance(weight: QuantTensor, dtype: torch.dtype, prefer: Prefer) -> float:
    if weight.format.activations == "int8":
        return INT8_INPUT_TOLERANCE
    return HALF_TOLERANCE if dtype in (torch.float16, torch.bfloat16) else TOLERANCE[prefer]


def reference(weight: QuantTensor, bias: torch.Tensor | None, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The outputs of some rows of the weight in float64 on the CPU."""
    full = unpack(weight.to("cpu"), torch.float32).reshape(weight.rows, weight.columns)[rows].double()
    wanted = x.cpu().double() @ full.t()
    return wanted if bias is None else wanted + bias.detach().cpu().double()[rows]


def question(weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype, m: int, prefer: Prefer) -> Question:
    """What the choice depends on."""
    host = weight.device.type == "cpu"
    size, name = f"{weight.rows}x{weight.columns}", str(dtype).removeprefix("torch.")
    return Question.of(
        "quantized product",
        f"{weight.format} weights {size}, {counted(m, 'row')} of {name}",
        str(weight.device),
        threads=torch.get_num_threads() if host else 0,
        # What was found without a compiler must not outlive the day one is installed.
        instructions=f"{native.level().name}{'' if cpp.available() else ', no C++'}" if host else "",
        triton="" if host else libraries.installed("triton"),
        libraries=[libraries.installed(name) for name in ("bitsandbytes", "torchao")] if prefer == "speed" else [],
        format=str(weight.format),
        size=size,
        rows=m,
        dtype=name,
        bias=bias is not None,
        tolerance=tolerance(weight, dtype, prefer),
    )
