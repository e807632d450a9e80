"""Matrix products on the GPU's matrix cores (`gpu.spirv.matmul`): which can run there, with which tiles, and their plans.

Half precision only, with sums in float32. Whether a tile is used, a measurement decides (`tuning`), as for every other
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from anytorch import settings
from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.layer import Spirv
from anytorch.gpu.runtime import Runtime
from anytorch.gpu.spirv import matmul as spirv
from anytorch.gpu.spirv.matmul import EIGHT, Tile
from anytorch.webgpu.dtypes import name_of

if TYPE_CHECKING:
    from anytorch.webgpu.products import Geometry, Operand

HALVES = (torch.float16, torch.bfloat16)
LEAST = 16  # rows, columns and steps; below, a matrix would be mostly padding
BUSY = 132  # workgroups that keep a large GPU busy
KEPT = 3  # tiles that are tried for a shape

# Drivers give a workgroup little memory, and little of a GPU's to all of them: one buffer leaves room for more workgroups.
TILES = (
    Tile(128, 128, 32, 2, 2, buffers=1),
    Tile(128, 128, 32, 2, 4, buffers=1),
    Tile(96, 128, 32, 2, 2, buffers=1),
    Tile(64, 128, 64, 2, 2, buffers=1),
    Tile(64, 128, 32, 2, 2),
    Tile(128, 64, 64, 2, 2, buffers=1),
    Tile(64, 64, 32, 2, 2, buffers=1),
    Tile(32, 64, 32, 1, 2, buffers=1),
    Tile(32, 32, 32, 1, 1, buffers=1),
)
SOFTWARE_TILES = (Tile(32, 32, 16, 2, 2),)  # a CPU's compiler takes minutes over what is written out for the others


@dataclass(frozen=True)
class MatrixTiling:
    """A tile, and into how many parts the sums are split."""

    tile: Tile
    splits: int = 1
    reads: str = "in units"  # or element by element: operands or a result whose rows begin anywhere

    @property
    def name(self) -> str:
        """By the tile alone: of sizes in one class, each has its own number of splits."""
        return self.tile.name


def in_use(runtime: Runtime, dtype: torch.dtype) -> bool:
    """Whether products of this dtype may run on the matrix cores. On a CPU adapter only where the setting says `on`."""
    cores = runtime.matrix_cores
    if dtype not in HALVES or cores.why_not or cores.shape_for(name_of(dtype)) is None:
        return False
    if dtype is torch.float16 and "shader-f16" not in runtime.features:
        return False
    return not runtime.adapter.software or settings.get("webgpu_matrix_cores") == "on"


def described(runtime: Runtime) -> str:
    """Whether the device's matrix cores are used, and if not why, for people."""
    cores = runtime.matrix_cores
    if cores.why_not:
        return f"not used: {cores.why_not}"
    used = [dtype for dtype in HALVES if in_use(runtime, dtype)]
    if not used:
        return (
            "not used: this adapter computes on the CPU" if runtime.adapter.software else "not used: no half precision"
        )
    shapes = {(shape.m, shape.n, shape.k) for shape in (shape_of(runtime, dtype) for dtype in used)}
    sizes = ", ".join("x".join(map(str, one)) for one in sorted(shapes))
    return f"used for products in {' and '.join(name_of(dtype) for dtype in used)}, where they are faster ({sizes})"


def in_units(operand: Operand, along_row: bool) -> bool:
    """Whether all runs of eight along its rows, or along its columns, lie in one unit of 16 bytes."""
    batch, row, column = operand.strides
    return operand.eights and (row if along_row else column) % EIGHT == 0 and batch % EIGHT == 0


def offered(runtime: Runtime, geometry: Geometry) -> list[MatrixTiling]:
    """The tiles that this product could run with, the likeliest first; [] where it cannot run on matrix cores."""
    dtype = geometry.a.dtype
    if geometry.b.dtype is not dtype or not in_use(runtime, dtype) or min(geometry.m, geometry.n, geometry.k) < LEAST:
        return []
    a_step = geometry.a.strides[2 if geometry.a_along == "k" else 1]
    b_step = geometry.b.strides[2 if geometry.b_along == "n" else 1]
    if a_step != 1 or b_step != 1:
        return []  # no two elements are neighbours
    shape = shape_of(runtime, dtype)
    memory = int(runtime.limits["max-compute-workgroup-storage-size"])
    most = int(runtime.limits["max-compute-invocations-per-workgroup"])
    tiles = SOFTWARE_TILES if runtime.adapter.software else TILES
    usable = [tile for tile in tiles if tile.fits(shape, memory, most)]
    # By sizes rounded up: the same tiles are tried for all products of a class, of which one is measured.
    batch, m, n, k = (1 << (size - 1).bit_length() for size in (geometry.batch, geometry.m, geometry.n, geometry.k))
    likely = sorted(usable, key=lambda tile: expected(tile, batch, m, n, k))[:KEPT]
    sizes = (geometry.batch, geometry.m, geometry.n)
    result = geometry.c.eights and not (geometry.c.strides[1] % EIGHT or geometry.n % EIGHT)
    whole = in_units(geometry.a, geometry.a_along == "k") and in_units(geometry.b, geometry.b_along == "n") and result
    reads = "in units" if whole and geometry.k % EIGHT == 0 else "element by element"
    return [MatrixTiling(tile, splits_for(groups_of(tile, *sizes), geometry.k, tile.bk), reads) for tile in likely]


def groups_of(tile: Tile, batch: int, m: int, n: int) -> int:
    return batch * -(-m // tile.bm) * -(-n // tile.bn)


def expected(tile: Tile, batch: int, m: int, n: int, k: int) -> float:
    """A rough cost: work beyond the edges, subgroups too few to keep the GPU busy, operands read over and over."""
    groups = groups_of(tile, batch, m, n)
    done = groups * tile.bm * tile.bn / (batch * m * n)
    busy = groups * splits_for(groups, k, tile.bk) * tile.subgroups / (BUSY * 4)
    reads = 1 + 32 * (1 / tile.bm + 1 / tile.bn)
    return done * reads * max(1.0, 1 / busy)


def splits_for(groups: int, k: int, bk: int) -> int:
    """Into how many parts to cut k so that enough workgroups run; each keeps at least eight steps."""
    if groups * 3 > BUSY:
        return 1
    return max(1, min(BUSY // groups, k // (8 * bk), 32))


def shape_of(runtime: Runtime, dtype: torch.dtype) -> spirv.Shape:
    cores = runtime.matrix_cores
    found = cores.shape_for(name_of(dtype))
    assert found is not None
    return spirv.Shape(found.m, found.n, found.k, cores.subgroup)


def plan(runtime: Runtime, geometry: Geometry, tiling: MatrixTiling) -> tuple[Plan, bool]:
    """The launch of this product, and whether it writes parts in float32 beside C, to be added up and cast."""
    tile, splits = tiling.tile, tiling.splits
    a_units, b_units = in_units(geometry.a, geometry.a_along == "k"), in_units(geometry.b, geometry.b_along == "n")
    m, n, k = geometry.m, geometry.n, geometry.k
    batch, row, column = geometry.c.strides
    stored = name_of(geometry.c.dtype)
    units = 4 if stored == "float32" else EIGHT  # elements of 16 bytes
    whole = geometry.c.eights and not (row % units or batch % units or n % units)
    beside = splits > 1 or column != 1
    if beside:
        stored, batch, row, whole = "float32", m * n, n, n % 4 == 0
    added = geometry.d if not beside else None
    steps = -(-k // tile.bk)
    chunk = -(-steps // splits) * tile.bk
    kernel = spirv.Product(
        name_of(geometry.a.dtype),
        stored,
        tile,
        shape_of(runtime, geometry.a.dtype),
        name_of(added.dtype) if added is not None else "",
        geometry.a_along,
        geometry.b_along,
        "" if beside else geometry.activation,
        split=beside,
        ragged_k=k % tile.bk != 0,
        a_units=a_units and (geometry.a_along == "m" or k % EIGHT == 0),
        b_units=b_units and (geometry.b_along == "n" or k % EIGHT == 0),
        whole_rows=whole,
    )
    tiles_m, tiles_n = -(-m // tile.bm), -(-n // tile.bn)
    x, y = grid(tiles_m * tiles_n * geometry.batch * splits)
    d_strides = added.strides if added is not None else (0, 0, 0)
    a_step = geometry.a.strides[1] if geometry.a_along == "k" else geometry.a.strides[2]
    b_step = geometry.b.strides[1] if geometry.b_along == "n" else geometry.b.strides[2]
    required = runtime.matrix_cores.required_subgroup
    launched = Plan(
        kernel,
        lambda kernel: Spirv(spirv.render(kernel), required),
        (x, y),
        [2, 2, *([added.dtype.itemsize] if added is not None else []), 4 if stored == "float32" else 2],
        1 << (kernel.bindings - 1),
        numbers="2f",
        tail=(
            *(m, n, k, chunk, splits, tiles_m, tiles_n, x, geometry.batch * splits),
            *(geometry.a.strides[0], a_step, geometry.b.strides[0], b_step),
            *(*d_strides, batch, row),
        ),
    )
    return launched, beside
