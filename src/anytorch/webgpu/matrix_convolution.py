"""Convolutions on matrix cores (`gpu.spirv.convolution`): which can run there, with which tiles, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anytorch.gpu.buffers import OFFSET_MASK
from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.layer import Spirv
from anytorch.gpu.runtime import Runtime
from anytorch.gpu.spirv import convolution as spirv
from anytorch.gpu.spirv.matmul import EIGHT, Tile
from anytorch.webgpu.matrix_products import LEAST, SOFTWARE_TILES, MatrixTiling, expected, in_use, shape_of
from anytorch.webgpu.tensors import new_contiguous

Pair = tuple[int, int]
KEPT = 2  # tiles that are tried for a shape
TILES = (
    Tile(128, 128, 32, 2, 2, buffers=1),
    Tile(64, 128, 32, 2, 2, buffers=1),
    Tile(128, 64, 32, 2, 2, buffers=1),
    Tile(64, 64, 32, 2, 2, buffers=1),
)


@dataclass(frozen=True)
class Gather:
    """A plain convolution of one or two dimensions: sizes, and the geometry of its window."""

    groups: int
    channels: int  # of x per group
    rows: int  # channels of the result per group
    images: int
    size: Pair  # of x
    result: Pair
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair

    @property
    def steps(self) -> int:
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def columns(self) -> int:
        return self.images * self.result[0] * self.result[1]


def offered(runtime: Runtime, x: torch.Tensor, weight: torch.Tensor, gather: Gather) -> list[MatrixTiling]:
    """The tiles that this convolution could run with, the likeliest first; [] where it cannot run on matrix cores."""
    place = weight.data_ptr() & OFFSET_MASK
    if not in_use(runtime, x.dtype) or gather.steps % EIGHT or place % 16 or "shader-f16" not in runtime.features:
        return []
    if min(gather.rows, gather.columns, gather.steps) < LEAST:
        return []
    shape = shape_of(runtime, x.dtype)
    memory = int(runtime.limits["max-compute-workgroup-storage-size"])
    most = int(runtime.limits["max-compute-invocations-per-workgroup"])
    tiles = SOFTWARE_TILES if runtime.adapter.software else TILES
    usable = [
        tile
        for tile in tiles
        if tile.fits(shape, memory, most) and tile.subgroups * shape.subgroup % (tile.bn // EIGHT) == 0
    ]
    groups, rows, columns = (1 << (size - 1).bit_length() for size in (gather.groups, gather.rows, gather.columns))
    # Sums are not split here: an expectation with k = 1 does not count on it.
    return [
        MatrixTiling(tile, reads="gathered")
        for tile in sorted(usable, key=lambda tile: expected(tile, groups, rows, columns, 1))[:KEPT]
    ]


def convolve(
    launch: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: Sequence[int]
) -> torch.Tensor:
    """The convolution by a plan, as a new contiguous tensor of `size`."""
    result = new_contiguous(size, x.dtype)
    bound = [weight, x, *([bias] if bias is not None else []), result]
    launch([one.data_ptr() for one in bound])
    return result


def plan(
    runtime: Runtime, gather: Gather, tiling: MatrixTiling, dtype: str, x_steps: tuple[int, int, int], bias: bool
) -> Plan:
    """The launch of this convolution. `x_steps` are those of x's images, channels and places."""
    tile = tiling.tile
    places = gather.result[0] * gather.result[1]
    m, n, k = gather.rows, gather.columns, gather.steps
    kernel = spirv.Convolution(
        dtype,
        dtype,
        tile,
        shape_of(runtime, getattr(torch, dtype)),
        dtype if bias else "",
        ragged_k=k % tile.bk != 0,
        whole_rows=places % EIGHT == 0,
        kernel=gather.kernel,
        stride=gather.stride,
        padding=gather.padding,
        dilation=gather.dilation,
    )
    tiles_m, tiles_n = -(-m // tile.bm), -(-n // tile.bn)
    x, y = grid(tiles_m * tiles_n * gather.groups)
    required = runtime.matrix_cores.required_subgroup
    return Plan(
        kernel,
        lambda kernel: Spirv(spirv.render(kernel), required),
        (x, y),
        [2] * kernel.bindings,
        1 << (kernel.bindings - 1),
        tail=(
            *(m, n, k, -(-k // tile.bk) * tile.bk, 1, tiles_m, tiles_n, x, gather.groups),
            *(gather.channels, *gather.size, *gather.result, *x_steps),
            *(gather.groups * m * places, places),
        ),
    )
