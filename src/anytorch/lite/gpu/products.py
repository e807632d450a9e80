"""Products of matrices, launched; and what convolutions, which are products too, share with them."""

from __future__ import annotations

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.matmul import Matrices, Schedule, matrices, render
from anytorch.lite.gpu.folds import as_shape, folded
from anytorch.lite.gpu.kernels import F32
from anytorch.lite.gpu.memory import Layout, new

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
    return render(matrices(key[0]), key[1])
