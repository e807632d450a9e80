"""Which schedule a matrix product runs with: a guess from its shape, then a measurement on this very device.

Guesses are free and good enough for small products. A product of more than `WORTH_MEASURING` multiplications is measured
(`anytorch.measured`) once per class of shapes (sizes rounded up to powers of two), each schedule's answer compared with the
plainest one's. CPU adapters are never measured: barriers and workgroup memory only cost there, whatever the shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from anytorch import logs, settings
from anytorch.errors import NoThread, WrongAnswer
from anytorch.gpu.profile import stopwatch_of
from anytorch.gpu.runtime import Runtime
from anytorch.gpu.wgsl.matmul import Schedule
from anytorch.measured.answers import near
from anytorch.measured.engine import Candidate, Check, measure
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question
from anytorch.webgpu.matrix_products import MatrixTiling
from anytorch.workers import Workers

log = logs.logger(__name__)

WORTH_MEASURING = 1 << 27  # 512 x 512 x 512
FEW = 8  # rows for which a product is a handful of dot products
BUSY_DISCRETE = 128  # workgroups that keep a large GPU busy
BUSY_INTEGRATED = 24

DIRECT = Schedule("direct", tm=4, tn=8)
DIRECT_SQUARE = Schedule("direct", tm=4, tn=4)  # for loads that are long functions: fewer copies of them
DIRECT_ROW = Schedule("direct", tm=1, tn=4)
LARGE = Schedule("tiled", 128, 128, 16, 8, 8)
LARGE_DOUBLE = Schedule("tiled", 128, 128, 16, 8, 8, double=True)
LARGE_SHALLOW = Schedule("tiled", 128, 128, 8, 8, 8, unroll=8, double=True)
LARGE_UNROLLED = Schedule("tiled", 128, 128, 16, 8, 8, unroll=16)
WIDE = Schedule("tiled", 64, 128, 16, 4, 8)
TALL = Schedule("tiled", 128, 64, 16, 8, 4)
MIDDLE = Schedule("tiled", 64, 64, 16, 4, 4)
MIDDLE_DENSE = Schedule("tiled", 64, 64, 16, 8, 8)
MIDDLE_DOUBLE = Schedule("tiled", 64, 64, 16, 4, 4, double=True)
SMALL = Schedule("tiled", 32, 32, 16, 4, 4)
TILES = (LARGE, LARGE_DOUBLE, LARGE_SHALLOW, LARGE_UNROLLED, TALL, WIDE, MIDDLE, MIDDLE_DOUBLE, MIDDLE_DENSE, SMALL)

ROUNDS, SAMPLE_S = 3, 2e-3
COMPILERS = 16  # threads that compile schedules side by side
BESIDE = 1  # other schedules that are tried beside those for matrix cores
COMPILING = 5  # times the setting `measure_s`: a driver compiles every schedule first
READ_BACK = (
    1 << 20
)  # elements of an answer that are compared on the host, in float64; more take longer than the products
# Of the result's size: sums in another order, and the result's own rounding.
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """What the choice depends on."""

    batch: int
    m: int
    n: int
    k: int
    b_along: str
    gathered: bool = False  # indices are computed on load: a convolution
    half: bool = False  # operands are f16


@dataclass(frozen=True)
class Tiling:
    """A schedule, and into how many parts the sums are split."""

    schedule: Schedule
    splits: int = 1

    @property
    def name(self) -> str:
        """By the schedule alone: of sizes in one class, each has its own number of splits."""
        numbers = [f"{key}={value}" for key, value in asdict(self.schedule).items() if key != "form" and value]
        return " ".join([self.schedule.form, *numbers])


def candidates(shape: Shape, *, software: bool, integrated: bool, shared_bytes: int) -> list[Tiling]:
    """Schedules that can compute this shape, the likeliest first."""
    if software:
        return [Tiling(DIRECT_ROW if shape.m == 1 else DIRECT_SQUARE if shape.gathered else DIRECT)]
    busy = BUSY_INTEGRATED if integrated else BUSY_DISCRETE
    if shape.m <= FEW and not shape.gathered:
        return _few_rows(shape, busy)
    if shape.m <= 2:  # depthwise: nothing is shared between rows
        return [Tiling(DIRECT_ROW)]
    found = []
    usable = [s for s in TILES if s.shared_bytes <= shared_bytes]
    for schedule in usable:
        groups = shape.batch * -(-shape.m // schedule.bm) * -(-shape.n // schedule.bn)
        splits = splits_for(groups, shape.k, busy)
        waste = _waste(shape.m, schedule.bm) * _waste(shape.n, schedule.bn)
        found.append((waste * (1.0 if groups * splits >= busy else busy / (groups * splits)), schedule, splits))
    best = min(cost for cost, _, _ in found)
    first = [Tiling(s, splits) for cost, s, splits in found if cost <= 1.25 * best]
    rest = [Tiling(s, splits) for cost, s, splits in found if 1.25 * best < cost <= 4 * best]
    both = first + rest
    if shape.half:  # half the workgroup memory traffic against a conversion per read: only a clock can tell
        both += [Tiling(Schedule(**{**asdict(c.schedule), "half": True}), c.splits) for c in both[:4]]
    return both


def _few_rows(shape: Shape, busy: int) -> list[Tiling]:
    form, widths = ("rows", (8, 4, 2, 1)) if shape.b_along == "k" else ("columns", (128, 64, 32))
    made = []
    for width in widths:
        schedule = Schedule(form, bn=width, tm=shape.m)
        groups = shape.batch * -(-shape.n // width)
        splits = splits_for(groups, shape.k, busy) if groups < busy else 1
        made.append((groups * splits < busy, Tiling(schedule, splits)))
    return [choice for _, choice in sorted(made, key=lambda pair: pair[0])]


def _waste(length: int, tile: int) -> float:
    """Work done per work asked for, along one side."""
    return -(-length // tile) * tile / length


def splits_for(groups: int, k: int, busy: int) -> int:
    """Into how many parts to cut k so that enough workgroups run; each part keeps at least 256 steps."""
    if groups >= busy or k < 512:
        return 1
    return max(1, min(-(-busy // groups), k // 256, 64))


def rounded(length: int) -> int:
    """Up to a power of two."""
    return 1 << (length - 1).bit_length()


AnyTiling = Tiling | MatrixTiling
Launch = Callable[[Any], torch.Tensor]
Prepare = Callable[[Any], object]


def offered(runtime: Runtime, shape: Shape, *, plainest: bool = False) -> list[Tiling]:
    """The candidates of this device for a shape; the plainest is the one a CPU adapter has."""
    adapter = runtime.adapter
    return candidates(
        shape,
        software=plainest or adapter.software,
        integrated=adapter.kind != "DiscreteGPU",
        shared_bytes=int(runtime.limits["max-compute-workgroup-storage-size"]),
    )


def choose(
    runtime: Runtime,
    shape: Shape,
    dtype: str,
    run: Launch,
    matrix_cores: Sequence[MatrixTiling] = (),
    *,
    prepare: Prepare | None = None,
) -> AnyTiling:
    """The schedule for a product. `run` launches it with a schedule and gives its result, which is only looked at;
    `prepare` compiles what that launches, in any thread.

    Where the product can run on `matrix_cores`, those tiles are tried, and only the likeliest of the others beside them.
    """
    adapter = runtime.adapter
    if matrix_cores and settings.get("webgpu_matrix_cores") == "on":
        return matrix_cores[0]
    options: list[AnyTiling] = [*matrix_cores, *offered(runtime, shape)[: BESIDE if matrix_cores else None]]
    work = shape.batch * shape.m * shape.n * shape.k
    guess = options[len(matrix_cores)]
    if len(options) == 1 or adapter.software or work < WORTH_MEASURING:
        return guess
    rows = shape.m if shape.m <= FEW else rounded(shape.m)  # a schedule for few rows is for exactly so many
    sizes = "x".join(str(size) for size in (rounded(shape.batch), rows, rounded(shape.n), rounded(shape.k)))
    title = f"{dtype} {shape.b_along}{' gathered' if shape.gathered else ''} {sizes}"
    device = f"{adapter.name} {adapter.driver} {adapter.api}"
    # Which tile is best depends on how elements are read and written, too.
    more = {"matrix_cores": sorted({one.reads for one in matrix_cores})} if matrix_cores else {}
    question = Question.of("matrix product", title, device, case=title, half=shape.half, **more)
    by_name = {option.name: option for option in options}
    budget_s = COMPILING * float(settings.get("measure_s"))
    verdict = recall(question, names=by_name, budget_s=budget_s)
    if verdict is None and runtime.recorder is not None:
        return guess  # what is tried would be recorded with the rest, and answers cannot be read back
    (plain,) = offered(runtime, shape, plainest=True)
    if verdict is None:
        runtime.synchronize()  # an index out of range in earlier work is not a candidate's mistake
        if prepare is not None:
            _compile_all(prepare, [plain, *options])
        try:
            truth = run(plain)
            check = near(truth, dtype=truth.dtype) if truth.numel() <= READ_BACK else _near_on_device(truth)
        except torch.OutOfMemoryError:
            return guess  # there is memory for the product, not for comparing; another time there may be
        verdict = measure(
            question,
            [Candidate.of(option.name, partial(run, option)) for option in options],
            check,
            most_error=MOST_ERROR[truth.dtype],
            stopwatch=stopwatch_of(runtime),
            budget_s=budget_s,
            rounds=ROUNDS,
            sample_s=SAMPLE_S,
        )
        remember(verdict)
    return by_name.get(verdict.chosen, plain)


def _compile_all(prepare: Prepare, options: Sequence[AnyTiling]) -> None:
    """Compile the candidates side by side: a driver takes a quarter of a second for each, most of a first use's time."""
    threads = min(len(options), os.cpu_count() or 1, COMPILERS)
    if threads < 2:
        return
    try:
        with Workers(threads, thread_name_prefix="anytorch-compile") as workers:
            for one in [workers.submit(prepare, option) for option in options]:
                one.exception()  # is raised again, and kept as the reason, where the candidate is tried
    except NoThread as exc:
        log.info("schedules are compiled one after the other: %s", exc)


def _near_on_device(truth: torch.Tensor) -> Check:
    """A check of large answers where they are: by the device's elementwise ops and sums, no products."""
    finite = truth.isfinite()
    wanted = torch.where(finite, truth, 0).float()
    size = max(float(wanted.norm()), 1e-30)

    def check(answer: torch.Tensor) -> float:
        if answer.dtype != truth.dtype or answer.shape != truth.shape:
            raise WrongAnswer(f"the answer is {answer.dtype} of shape {tuple(answer.shape)}")
        return float(torch.where(finite, answer.float() - wanted, 0).norm()) / size

    return check
