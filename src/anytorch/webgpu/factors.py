"""LU, Cholesky and triangular solves of float32 matrices in place, block by block (`gpu.wgsl.factor`).

Every tensor here is (batch, rows, columns), with any steps between its elements; a matrix that a batch shares is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.buffers import SHIFT
from anytorch.gpu.launch import grid
from anytorch.gpu.wgsl import factor as wgsl
from anytorch.gpu.wgsl.factor import BLOCK, COLUMN_THREADS
from anytorch.webgpu.launch import launch


def factorise_lu(a: torch.Tensor, pivots: torch.Tensor, infos: torch.Tensor) -> None:
    """P L U in the place of `a`. `pivots` (batch, min(rows, columns)) and `infos` (batch), int32, are new; infos are 0."""
    batches, rows, columns = a.shape
    count = min(rows, columns)
    for first in range(0, count, BLOCK):
        width = min(BLOCK, count - first)
        end = first + width
        numbers = (batches, rows, first, width, count, grid(batches)[0], *a.stride())
        _run(wgsl.Panel(), wgsl.render_panel, [a, pivots, infos], batches, 0b111, numbers, placed=1)
        if columns > width:
            swap_rows(a, pivots, first, width, width)
        if columns > end:
            right = a[:, first:end, end:]
            _substitute(a[:, first:end, first:end], right, upper=False, unit=True)
            if rows > end:
                _update(a[:, end:, first:end], right, a[:, end:, end:])


def factorise_cholesky(a: torch.Tensor, infos: torch.Tensor) -> None:
    """L of L Lᵀ in the place of `a`, of which only the lower triangle is read and written."""
    batches, rows, _ = a.shape
    for first in range(0, rows, BLOCK):
        width = min(BLOCK, rows - first)
        end = first + width
        numbers = (batches, first, width, grid(batches)[0], *a.stride())
        _run(wgsl.Corner(), wgsl.render_corner, [a, infos], batches, 0b11, numbers, placed=1)
        if end < rows:
            below = a[:, end:, first:end]
            _substitute(a[:, first:end, first:end], below.mT, upper=False, unit=False)
            _update(below, below.mT, a[:, end:, end:], lower=True)


def solve_triangular(a: torch.Tensor, x: torch.Tensor, *, upper: bool, unit: bool) -> None:
    """The solution of a y = x in the place of `x`."""
    rows = a.shape[1]
    starts = range(0, rows, BLOCK)
    for first in reversed(starts) if upper else starts:
        end = min(first + BLOCK, rows)
        solved = x[:, first:end]
        _substitute(a[:, first:end, first:end], solved, upper=upper, unit=unit)
        rest = slice(0, first) if upper else slice(end, rows)
        if rest.start < rest.stop:
            _update(a[:, rest, first:end], solved, x[:, rest])


def swap_rows(
    x: torch.Tensor, pivots: torch.Tensor, first: int, count: int, width: int = 0, *, reverse: bool = False
) -> None:
    """Swap rows of `x` as `count` pivots from `first` on say, in all columns but `width` from `first` on."""
    batches, _, columns = x.shape
    groups = -(-(columns - width) // COLUMN_THREADS)
    total = batches * groups
    numbers = (batches, columns, first, count, width, pivots.stride(0), groups, grid(total)[0], *x.stride())
    _run(wgsl.Swap(reverse), wgsl.render_swap, [pivots, x], total, 0b10, numbers)


def _substitute(a: torch.Tensor, x: torch.Tensor, *, upper: bool, unit: bool) -> None:
    """A block of `x` solved with the triangle `a`, which may lie in the same buffer."""
    batches, width, columns = x.shape
    groups = -(-columns // COLUMN_THREADS)
    total = batches * groups
    shared = _share(a, x)
    numbers = (batches, columns, width, groups, grid(total)[0], _way(x, a, shared), *a.stride(), *x.stride())
    bound, writable = ([x], 0b1) if shared else ([a, x], 0b10)
    _run(wgsl.Substitute(upper, unit, shared), wgsl.render_substitute, bound, total, writable, numbers)


def _update(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, lower: bool = False) -> None:
    """c -= a b, where b lies in c's buffer, and a may."""
    batches, rows, columns = c.shape
    across = -(-columns // BLOCK)
    tiles = -(-rows // BLOCK) * across
    groups, shared = batches * tiles, _share(a, c)
    ways = _way(c, a, shared), _way(c, b, True)
    sizes = (batches, rows, columns, a.shape[2], tiles, across, grid(groups)[0])
    numbers = (*sizes, *ways, *a.stride(), *b.stride(), *c.stride())
    bound, writable = ([c], 0b1) if shared else ([a, c], 0b10)
    _run(wgsl.Update(shared, lower), wgsl.render_update, bound, groups, writable, numbers)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() >> SHIFT == other.data_ptr() >> SHIFT


def _way(start: torch.Tensor, end: torch.Tensor, shared: bool) -> int:
    """Elements between two tensors' first ones, if a shader finds both by one place."""
    return (end.data_ptr() - start.data_ptr()) // 4 if shared else 0


def _run(
    kernel: Any,
    render: Callable[[Any], str],
    tensors: Sequence[torch.Tensor],
    groups: int,
    writable: int,
    numbers: tuple[int, ...],
    placed: int | None = None,
) -> None:
    placed = len(tensors) if placed is None else placed
    launch(kernel, render, tensors, groups, placed=placed, writable=writable, head=numbers)
