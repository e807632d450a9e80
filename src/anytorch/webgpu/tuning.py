"""Which schedule a matrix product runs with: a guess from its shape, then a measurement on this very device.

Guesses are free and good enough for small products. A product of more than `WORTH_MEASURING` multiplications is measured
once per class of shapes (sizes rounded up to powers of two), and the winner is remembered on disk for this adapter and
driver. CPU adapters are never measured: barriers and workgroup memory only cost there, whatever the shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from anytorch.cache import Store
from anytorch.errors import CacheError
from anytorch.gpu.native import ShaderError
from anytorch.gpu.runtime import Runtime
from anytorch.gpu.wgsl.matmul import Schedule
from anytorch.logs import logger

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

_known: dict[str, dict[str, Any]] = {}
_log = logger(__name__)


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
class Choice:
    schedule: Schedule
    splits: int = 1


def candidates(shape: Shape, *, software: bool, integrated: bool, shared_bytes: int) -> list[Choice]:
    """Schedules that can compute this shape, the likeliest first."""
    if software:
        return [Choice(DIRECT_ROW if shape.m == 1 else DIRECT_SQUARE if shape.gathered else DIRECT)]
    busy = BUSY_INTEGRATED if integrated else BUSY_DISCRETE
    if shape.m <= FEW and not shape.gathered:
        return _few_rows(shape, busy)
    if shape.m <= 2:  # depthwise: nothing is shared between rows
        return [Choice(DIRECT_ROW)]
    found = []
    usable = [s for s in TILES if s.shared_bytes <= shared_bytes]
    for schedule in usable:
        groups = shape.batch * -(-shape.m // schedule.bm) * -(-shape.n // schedule.bn)
        splits = splits_for(groups, shape.k, busy)
        waste = _waste(shape.m, schedule.bm) * _waste(shape.n, schedule.bn)
        found.append((waste * (1.0 if groups * splits >= busy else busy / (groups * splits)), schedule, splits))
    best = min(cost for cost, _, _ in found)
    first = [Choice(s, splits) for cost, s, splits in found if cost <= 1.25 * best]
    rest = [Choice(s, splits) for cost, s, splits in found if 1.25 * best < cost <= 4 * best]
    both = first + rest
    if shape.half:  # half the workgroup memory traffic against a conversion per read: only a clock can tell
        both += [Choice(Schedule(**{**asdict(c.schedule), "half": True}), c.splits) for c in both[:4]]
    return both


def _few_rows(shape: Shape, busy: int) -> list[Choice]:
    form, widths = ("rows", (8, 4, 2, 1)) if shape.b_along == "k" else ("columns", (128, 64, 32))
    made = []
    for width in widths:
        schedule = Schedule(form, bn=width, tm=shape.m)
        groups = shape.batch * -(-shape.n // width)
        splits = splits_for(groups, shape.k, busy) if groups < busy else 1
        made.append((groups * splits < busy, Choice(schedule, splits)))
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


def choose(
    runtime: Runtime, shape: Shape, dtype: str, run: Callable[[Choice], None], *, may_measure: bool = True
) -> Choice:
    """The schedule for a product. `run` launches it with a schedule, into a result that may be overwritten."""
    adapter = runtime.adapter
    options = candidates(
        shape,
        software=adapter.software,
        integrated=adapter.kind != "DiscreteGPU",
        shared_bytes=int(runtime.limits["max-compute-workgroup-storage-size"]),
    )
    work = shape.batch * shape.m * shape.n * shape.k
    if len(options) == 1 or adapter.software or work < WORTH_MEASURING or not may_measure:
        return options[0]
    device = f"{adapter.name} {adapter.driver} {adapter.api}"
    rows = shape.m if shape.m <= FEW else rounded(shape.m)  # a schedule for few rows is for exactly so many
    sizes = "x".join(str(size) for size in (rounded(shape.batch), rows, rounded(shape.n), rounded(shape.k)))
    name = f"{dtype} {shape.b_along}{' gathered' if shape.gathered else ''} {sizes}"
    known = _remembered(device)
    if name in known:
        saved = known[name]
        choice = Choice(Schedule(**saved["schedule"]), saved["splits"])
        if choice.schedule in [option.schedule for option in options]:
            return next(option for option in options if option.schedule == choice.schedule)
    choice = fastest(runtime, options, run)
    known[name] = {"schedule": asdict(choice.schedule), "splits": choice.splits}
    _remember(device, known)
    return choice


def _remembered(device: str) -> dict[str, Any]:
    if device not in _known:
        try:
            _known[device] = dict(Store("webgpu-matmul").get(device) or {})
        except CacheError as exc:
            _log.warning("%s; matrix products are measured again", exc)
            _known[device] = {}
    return _known[device]


def _remember(device: str, known: dict[str, Any]) -> None:
    try:
        Store("webgpu-matmul").put(device, known)
    except CacheError as exc:
        _log.warning("%s; this session's measurements are not kept", exc)


def fastest(runtime: Runtime, options: Sequence[Choice], run: Callable[[Choice], None]) -> Choice:
    """Run each option on the GPU and return the quickest. One this driver cannot compile is left out.

    A GPU that was idle needs some time to reach its clock, and short windows time the submission: so it is kept busy first,
    each option is timed for `WINDOW_S`, and all of them in turn, `ROUNDS` times.
    """
    usable: list[Choice] = []
    refused: ShaderError | None = None
    for option in options:
        try:
            run(option)  # compiles it
        except ShaderError as exc:
            refused = exc
            _log.warning("this driver refuses the schedule %s: %s", option.schedule, str(exc).splitlines()[0])
            continue
        usable.append(option)
    if not usable:
        assert refused is not None
        raise refused
    if len(usable) == 1:
        return usable[0]

    def seconds(option: Choice, repetitions: int) -> float:
        runtime.synchronize()
        start = time.perf_counter()
        for _ in range(repetitions):
            run(option)
        runtime.synchronize()
        return (time.perf_counter() - start) / repetitions

    until = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until:
        once = seconds(usable[0], 4)
    repetitions = max(1, min(200, int(WINDOW_S / once)))
    times = dict.fromkeys(usable, float("inf"))
    for _ in range(ROUNDS):
        for option in usable:
            if times[option] > 3 * min(times.values()) and times[option] < float("inf"):
                continue  # hopeless after one round
            times[option] = min(times[option], seconds(option, repetitions))
    return min(times, key=lambda option: times[option])


WARM_UP_S = 0.05
WINDOW_S = 0.002
ROUNDS = 3
