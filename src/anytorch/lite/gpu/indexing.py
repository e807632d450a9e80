"""Rows of a tensor by their numbers, and adding to them: embeddings, `x[[2, 0, 2]]` and their gradients."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.wgsl import indexing as wgsl
from anytorch.lite.dtypes import Array
from anytorch.lite.gpu.kernels import F32, I32
from anytorch.lite.gpu.memory import Layout, new, write


def take_rows(x: Layout, numbers: Array) -> Layout:
    """(n, …) and numbers (…) → (…, …): row by row. `x` is dense; the numbers are from 0 to n − 1."""
    out = new((*numbers.shape, *x.shape[1:]))
    width = prod(x.shape[1:])
    walk = wgsl.Walk(1, (I32,), 2)
    kernel = wgsl.Gather(4, walk)
    # The result is walked as (rows, width): the source moves along the width, the numbers along the rows.
    launch(kernel, wgsl.render_gather, (x,), numbers, out, ((0, 1), (1, 0)), (x.shape[0], width))
    return out


def add_rows(target: Layout, numbers: Array, values: Layout) -> None:
    """target[numbers[i]] += values[i], also where a number comes twice. Both are dense."""
    width = prod(target.shape[1:])
    kernel = wgsl.Scatter(4, wgsl.Walk(2, (I32,), 2), "sum", F32)
    steps = ((width, 1), (0, 1), (1, 0))
    launch(kernel, wgsl.render_scatter, (values, target), numbers, target, steps, (target.shape[0], width))


def launch(
    kernel: wgsl.Gather | wgsl.Scatter,
    render: Any,
    walked: tuple[Layout, ...],
    numbers: Array,
    out: Layout,
    steps: tuple[tuple[int, int], ...],
    indexed: tuple[int, int],
) -> None:
    """`steps` are those of the walked operands and of the numbers, over (rows, width)."""
    rows, width = numbers.size, indexed[1]
    if not rows * width:
        return
    where = write(numbers.reshape(-1), np.int32)
    x, y = grid(-(-rows * width // wgsl.WORKGROUP))
    geometry = (rows, width, *(step for each in steps for step in each), *indexed)
    bound = (*walked, where) if isinstance(kernel, wgsl.Scatter) else (*walked, where, out)
    places = [4] * (len(walked) + 1)
    rest, head = len(bound) - len(places), (rows * width, x * wgsl.WORKGROUP)
    plan = Plan(kernel, render, (x, y), places, kernel.writable, unplaced=rest, head=head, tail=geometry)
    plan([layout.address for layout in bound])
