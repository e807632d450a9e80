"""Kernels that fold numbers together, launched: reductions of any axes, rules for whole rows, running sums, products."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import matmul as wgsl_matmul
from anytorch.gpu.wgsl import reduce as wgsl_reduce
from anytorch.gpu.wgsl import rows as wgsl_rows
from anytorch.gpu.wgsl import scan as wgsl_scan
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, collapse
from anytorch.gpu.wgsl.matmul import Matrices, Schedule
from anytorch.gpu.wgsl.softmax import RowRule
from anytorch.gpu.wgsl.types import dense_strides
from anytorch.lite.gpu.kernels import F32, I32, Layout, copied, new

PART, MOST_PARTS, FEW_ROWS = 4096, 256, 64  # few long rows are cut into parts, whose states a second launch folds
MOST_HELD = 4  # fours of a row that a thread keeps between folding and writing
LONG = 32  # from here on a workgroup takes a row; below, and on software adapters, a thread does


def by_group(length: int) -> bool:
    return length > LONG and not open_runtime().adapter.software


class Fold:
    """How the axes `over` of arrays of one geometry are folded: in one launch, or in two where few rows are long."""

    __slots__ = ("launches", "state_words")

    def __init__(self, name: str, x: Layout, over: Sequence[int], places: bool) -> None:
        kept = [d for d in range(len(x.shape)) if d not in over]
        outer, (outer_steps,) = collapse([x.shape[d] for d in kept], [[x.strides[d] for d in kept]])
        inner, (inner_steps,) = collapse([x.shape[d] for d in over], [[x.strides[d] for d in over]])
        rows, length = prod(outer), prod(inner)
        group = by_group(length)
        parts = min(-(-length // PART), MOST_PARTS) if group and rows < FEW_ROWS else 1
        chunk = -(-length // (4 * parts)) * 4 if parts > 1 else length
        reducer, outputs = wgsl_reduce.REDUCERS[name], (F32, I32) if places else (F32,)
        first = wgsl_reduce.Reduce(
            reducer,
            (F32,),
            outputs,
            "f32",
            *(len(outer), len(inner)),
            "whole" if parts == 1 else "first",
            threads=256 if group and length > 1024 else 64,
            group=group,
            scalars=1,
            quads=group and inner_steps == [1] and in_quads(x, length, chunk, outer_steps),
        )
        if first.words > MOST_WORDS:
            raise TooManyAxes
        before = (rows, length, parts, chunk, length, *outer, *inner)
        after = (*outer_steps, *inner_steps, 0.0)
        self.launches = [stage(first, rows * parts, [4], before, after)]
        self.state_words = 0
        if parts > 1:
            self.state_words = parts * len(reducer.fields)
            second = wgsl_reduce.Reduce(reducer, (F32,), outputs, "f32", 0, 0, "second", group=True, scalars=1)
            self.launches.append(stage(second, rows, [], (rows, parts, 1, parts, length, 0.0), ()))


def in_quads(x: Layout, length: int, chunk: int, steps: Sequence[int]) -> bool:
    """Whether rows are made of whole fours, that one load can take."""
    return not any(number % 4 for number in (length, chunk, x.offset, *steps))


class TooManyAxes(Exception):
    """More than the parameters of a launch hold."""


def stage(
    kernel: wgsl_reduce.Reduce, workers: int, places: Sequence[int], head: Sequence[float], tail: Sequence[float]
) -> Plan:
    groups = grid(workers if kernel.group else -(-workers // kernel.threads))
    rest = kernel.buffers - len(places)
    return Plan(kernel, wgsl_reduce.render, groups, places, kernel.writable, unplaced=rest, head=head, tail=tail)


def folded(name: str, x: Layout, over: Sequence[int], places: bool = False) -> tuple[Layout, ...]:
    """Fold the axes `over` of `x`, any strides: one dense row of results, and for extremes the places (int32) if asked.

    A variance is of all numbers, not of a sample.
    """
    kept = [d for d in range(len(x.shape)) if d not in over]
    rows = prod([x.shape[d] for d in kept])
    results = tuple(new((rows,)) for _ in range(1 + places))
    if not rows:
        return results
    key = ("lite fold", name, x.shape, x.strides, x.offset % 4, tuple(over), places)
    plan = plans[key]
    if plan is None:
        try:
            plan = plans[key] = Fold(name, x, over, places)
        except TooManyAxes:
            order = (*kept, *over)
            shape, strides = (tuple(each[d] for d in order) for each in (x.shape, x.strides))
            together = copied(Layout(x.memory, shape, strides, x.offset))
            return folded(name, together, range(len(kept), len(order)), places)
    if plan.state_words:
        states = new((rows, plan.state_words))
        plan.launches[0]((x.address, states.address))
        plan.launches[1]([each.address for each in (states, *results)])
    else:
        plan.launches[0]([each.address for each in (x, *results)])
    return results


def by_rows(
    rule: RowRule,
    inputs: Sequence[tuple[Layout, str]],
    shape: tuple[int, ...],
    dim: int,
    row_outputs: tuple[str, ...] = (),
    scalars: tuple[float, ...] = (),
) -> tuple[Layout, ...]:
    """A rule for rows along `dim` of dense tensors of `shape`: the new tensor, and a number per row for each row output.

    Inputs come with what they are indexed by: "element", "column" or "row".
    """
    out = new(shape)
    rows = out.size // shape[dim] if shape[dim] else 0
    per_row = tuple(new((rows,)) for _ in row_outputs)
    if not out.size:
        return out, *per_row
    given = [layout for layout, _ in inputs]
    aligned = not any([layout.offset & 3 for layout in given])
    key = ("lite rows", rule, shape, dim, tuple([per for _, per in inputs]), aligned, scalars)
    plan = plans[key]
    if plan is None:
        length, inner = shape[dim], prod(shape[dim + 1 :])
        group = by_group(length)
        quads = group and aligned and inner == 1 and length % 4 == 0
        threads = 256 if group and length > 1024 else 64
        kernel = wgsl_rows.Rows(
            rule.reducer,
            tuple(wgsl_rows.Input(F32, per) for _, per in inputs),
            rule.enter,
            rule.prepare,
            rule.output,
            F32,
            row_outputs,
            scalars=len(scalars),
            strided=inner != 1,
            group=group,
            threads=threads,
            quads=quads,
            held=min(-(-length // (4 * threads)), MOST_HELD) if quads else 0,
            twice=rule.twice,
        )
        groups = grid(rows if group else -(-rows // kernel.threads))
        plan = plans[key] = Plan(
            kernel,
            wgsl_rows.render,
            groups,
            [4] * len(inputs),
            kernel.writable,
            unplaced=1 + len(per_row),
            head=(rows, length, inner),
            tail=scalars,
        )
    plan([layout.address for layout in (*given, out, *per_row)])
    return out, *per_row


def running(name: str, x: Layout, dim: int) -> Layout:
    """The fold of each row along `dim` up to every place; `x` is dense."""
    out = new(x.shape)
    if not x.size:
        return out
    length, inner = x.shape[dim], prod(x.shape[dim + 1 :])
    rows, group = x.size // length, by_group(length)
    kernel = wgsl_scan.Scan(wgsl_scan.SCANS[name], F32, (F32,), "f32", group)
    groups = grid(rows if group else -(-rows // wgsl_scan.THREADS))
    head = (rows, length, inner, 1, length)
    plan = Plan(kernel, wgsl_scan.render, groups, [4], kernel.writable, unplaced=1, head=head)
    plan((x.address, out.address))
    return out


def as_shape(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The same dense numbers under another shape."""
    return Layout(layout.memory, shape, dense_strides(shape), layout.offset)


# --- products of matrices; and what convolutions, which are products too, share with them ----------------------------

# Tiles in workgroup memory on GPUs; a CPU that plays GPU (llvmpipe) is faster without.
TILED = Schedule("tiled", 64, 64, 16, 4, 4)
LARGE = Schedule("tiled", 128, 128, 8, 8, 8)
ENOUGH = 1024  # rows and columns from which large tiles are enough to keep a GPU busy
DIRECT = Schedule("direct", tm=4, tn=8)
DIRECT_ROW = Schedule("direct", tm=1, tn=4)

BUSY = 128  # workgroups that keep a large GPU busy
LEAST_PART = 512  # products that a part of a sum is worth


def splits_of(schedule: Schedule, batch: int, m: int, n: int, k: int) -> int:
    """Into how many parts the sums over k are cut, so that a product of few tiles keeps a GPU busy."""
    if open_runtime().adapter.software:
        return 1
    tiles = -(-m // schedule.tile_m) * -(-n // schedule.tile_n) * batch
    return max(1, min(BUSY // tiles, k // LEAST_PART))


def product_grid(
    schedule: Schedule, batch: int, m: int, n: int, k: int, splits: int
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """A schedule's parameters, and the launch."""
    step = max(schedule.bk, 4)
    chunk = -(-k // (splits * step)) * step
    tiles_m, tiles_n = -(-m // schedule.tile_m), -(-n // schedule.tile_n)
    x, y = grid(tiles_m * tiles_n * batch * splits)
    return (m, n, k, chunk, splits, tiles_m, tiles_n, x, batch * splits), (x, y)


def added(parts: Layout, batch: int, splits: int, shape: tuple[int, ...]) -> Layout:
    """The parts (batch, splits, …) of each sum, added up, under the name of `shape`."""
    each = parts.size // (batch * splits)
    (out,) = folded("sum", Layout(parts.memory, (batch, splits, each), (splits * each, each, 1)), (1,))
    return as_shape(out, shape)


def product(a: Layout, b: Layout, shape: tuple[int, ...], batch: int, m: int, n: int, k: int) -> Layout:
    """(batch, m, k) @ (batch, k, n), strided → (batch, m, n), dense, called `shape`. A matrix serves the whole batch."""
    aligned = not (a.offset | b.offset) & 3
    key = ("lite product", a.strides, b.strides, aligned, batch, m, n, k)
    known = plans[key]
    if known is None:
        steps = [each.strides if len(each.strides) == 3 else (0, *each.strides) for each in (a, b)]
        schedule = schedule_for(m, n)
        splits = splits_of(schedule, batch, m, n, k)
        spec = matrices_of(steps[0], steps[1], m, n, k, schedule, aligned, splits > 1)
        numbers, groups = product_grid(schedule, batch, m, n, k, splits)
        tail = (*numbers, *steps[0], *steps[1], 0, 0, 0, m * n, n, 1)
        plan = Plan((spec, schedule), render_product, groups, [4, 4, 4], 0b100, head=(1.0, 0.0), tail=tail)
        known = plans[key] = (plan, splits)
    plan, splits = known
    out = new(shape if splits == 1 else (batch, splits, m, n))
    plan((a.address, b.address, out.address))
    return out if splits == 1 else added(out, batch, splits, shape)


def schedule_for(m: int, n: int) -> Schedule:
    if open_runtime().adapter.software or m <= 4:
        return DIRECT_ROW if m == 1 else DIRECT
    return LARGE if m >= ENOUGH and n >= ENOUGH else TILED


def matrices_of(
    a: tuple[int, ...], b: tuple[int, ...], m: int, n: int, k: int, schedule: Schedule, aligned: bool, split: bool
) -> Matrices:
    """How matrices of these strides (batch, row, column) are read: along which index, and four at a time where they can."""

    def fours(length: int, contiguous: int, *others: int) -> bool:
        return aligned and contiguous == 1 and not any(number % 4 for number in (length, *others))

    a_along, b_along = "k" if a[2] == 1 else "m", "n" if b[2] == 1 else "k"
    a_vector = fours(k, a[2], a[1], a[0]) if a_along == "k" else fours(m, a[1], a[2], a[0]) and schedule.form == "tiled"
    b_vector = fours(n, b[2], b[1], b[0]) if b_along == "n" else fours(k, b[1], b[2], b[0])
    return Matrices(F32, F32, F32, "", a_along, b_along, a_vector, b_vector, n % 4 == 0, split=split)


def render_product(key: tuple[Matrices, Schedule]) -> str:
    return wgsl_matmul.render(wgsl_matmul.matrices(key[0]), key[1])
