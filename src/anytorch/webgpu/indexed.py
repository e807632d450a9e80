"""Reads and writes elements where other tensors say: from tensors to launches of the kernels in `gpu.wgsl.indexing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from anytorch.gpu.buffers import SHIFT
from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import indexing as wgsl
from anytorch.gpu.wgsl.elementwise import collapse
from anytorch.webgpu.copies import contiguous
from anytorch.webgpu.dtypes import name_of
from anytorch.webgpu.launch import launch, plan_over
from anytorch.webgpu.tensors import new_contiguous

# An index tensor broadcast to the walk, and the size and stride of the dimension it indexes.
Index = tuple[torch.Tensor, Sequence[int], int, int]


def gather(
    source: torch.Tensor,
    size: Sequence[int],
    strides: Sequence[int],
    indices: Sequence[Index] = (),
    *,
    offset: int = 0,
    wrap: bool = False,
    into: torch.Tensor | None = None,
    site: int = 0,
) -> torch.Tensor:
    """A contiguous tensor of `size`: each element from `source` (walked with `strides`, from `offset` elements on) at the
    place the indices name. A new tensor, or `into` where that can be written as a whole.

    With a `site` (`faults.site_of`) an index out of range is reported, here and in `scatter`."""
    if into is not None and _whole(into) and into.data_ptr() >> SHIFT != source.data_ptr() >> SHIFT:
        result = into
    else:
        result = new_contiguous(size, source.dtype)
    if result.numel() == 0:
        return result
    address = source.data_ptr() + offset * source.dtype.itemsize
    plan = find_plan("", source.dtype, size, (strides,), indices, address, wrap, site)
    plan([address, *[index[0].data_ptr() for index in indices], result.data_ptr()])
    return result


def _whole(tensor: torch.Tensor) -> bool:
    """Whether the tensor fills its storage, without gaps."""
    filled = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return filled and tensor.is_contiguous()


def scatter(
    target: torch.Tensor,
    strides: Sequence[int],
    source: torch.Tensor,
    source_strides: Sequence[int],
    size: Sequence[int],
    indices: Sequence[Index],
    *,
    mode: str = "set",
    wrap: bool = False,
    site: int = 0,
) -> None:
    """Write `source` (walked over `size`) into `target` where the indices say.

    `mode` other than "set" combines with what is there: float32 and int32, and int64 sums.
    """
    if 0 in size:
        return
    held = target.data_ptr() >> SHIFT
    if source.data_ptr() >> SHIFT == held:  # would be bound for reading and writing at once
        source, source_strides = _elsewhere(source, size, source_strides)
    indices = [
        (_elsewhere(index, size, steps) if index.data_ptr() >> SHIFT == held else (index, steps)) + (length, stride)
        for index, steps, length, stride in indices
    ]
    at, there = source.data_ptr(), target.data_ptr()
    plan = find_plan(mode, target.dtype, size, (source_strides, strides), indices, at | there, wrap, site)
    plan([at, there, *[index[0].data_ptr() for index in indices]])


def _elsewhere(tensor: torch.Tensor, size: Sequence[int], steps: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
    copy = tensor.as_strided(size, steps, tensor.storage_offset()).clone(memory_format=torch.contiguous_format)
    return copy, copy.stride()


def positions(mask: torch.Tensor) -> torch.Tensor:
    """The coordinates of every element of a bool tensor that is set, a row each, as torch.nonzero returns them.

    Waits for the device: how many there are decides the result's size.
    """
    count = mask.numel()
    rank = mask.dim()
    if count == 0:
        return new_contiguous((0, rank), torch.int64)
    flat = contiguous(mask).reshape(-1)
    counts = flat.to(torch.int32).cumsum(0, dtype=torch.int32)
    result = new_contiguous((int(counts[-1].item()), rank), torch.int64)
    if result.numel():
        groups = -(-count // wgsl.WORKGROUP)
        head = (count, grid(groups)[0] * wgsl.WORKGROUP)
        tensors = (flat, counts, result)
        launch(wgsl.Compact(rank), wgsl.render_compact, tensors, groups, placed=2, head=head, tail=tuple(mask.shape))
    return result


def find_plan(
    mode: str,
    dtype: torch.dtype,
    size: Sequence[int],
    strides: Sequence[Sequence[int]],
    indices: Sequence[Index],
    addresses: int,
    wrap: bool,
    site: int = 0,
) -> Plan:
    """The plan for this geometry; `mode` is "" for reading, `addresses` are those of the walked operands, or-ed."""
    key = (
        *("indexed", mode, dtype, wrap, addresses & 15, site),
        *size,
        *[tuple(steps) for steps in strides],
        *[(index.dtype, tuple(steps), length, stride) for index, steps, length, stride in indices],
    )
    plan: Plan | None = plans[key]
    if plan is not None:
        return plan
    operands, nbytes = len(strides), dtype.itemsize
    sizes, merged = collapse(size, [*strides, *[index[1] for index in indices]])
    steps = [index[3] for index in indices]
    wide = nbytes  # elements travel together where they can
    dense = bool(sizes) and all(m[-1] == 1 for m in merged[:operands]) and all(m[-1] == 0 for m in merged[operands:])
    if mode in ("", "set") and dense:
        others = [(addresses & 15) // nbytes, *steps, *[step for m in merged[:operands] for step in m[:-1]]]
        wide = wgsl.widest(nbytes, sizes[-1], others)
    factor = wide // nbytes
    if factor > 1:
        sizes[-1] //= factor
        steps = [step // factor for step in steps]
        for m in merged[:operands]:
            m[:-1] = [step // factor for step in m[:-1]]
    count = math.prod(size) // factor
    extents = [(index[2], step) for index, step in zip(indices, steps, strict=True)]
    dtypes = tuple(name_of(index[0].dtype) for index in indices)
    walk = wgsl.Walk(operands, dtypes, len(sizes), wrap, reports=site > 0)
    tail = [*sizes, *[step for m in merged for step in m], *[number for pair in extents for number in pair]]
    if walk.words > wgsl.MOST_WORDS:
        walk = replace(walk, shape=tuple(sizes), strides=tuple(tuple(m) for m in merged), extents=tuple(extents))
        tail = []
    places = [*[wide] * operands, *[index[0].dtype.itemsize for index in indices]]
    kind = "" if mode in ("", "set") else name_of(dtype)
    atomics = mode == "sum" and kind == "float32" and "shader-float32-atomic" in open_runtime().features
    kernel = wgsl.Scatter(wide, walk, mode, kind, atomics) if mode else wgsl.Gather(wide, walk)
    per_thread = 1 if isinstance(kernel, wgsl.Scatter) else kernel.per_thread
    render: Callable[[Any], str] = wgsl.render_scatter if mode else wgsl.render_gather
    plan = plans[key] = plan_over(
        *(count, kernel, render, places, kernel.writable, wgsl.WORKGROUP, per_thread),
        unplaced=not mode,
        tail=tail,
        site=site,
    )
    return plan
