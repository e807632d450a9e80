"""Putting tensors together and turning them round: cat, flip and roll.

stack, repeat, pad, the *_scatter and *_backward ops of views and tile need nothing here: torch makes them of copies into
views, which are our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from anytorch.gpu.buffers import TAG
from anytorch.gpu.launch import Plan
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.wgsl.cat import MOST_WORDS, WORKGROUP, Cat, merge, render, unit_of
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.indexed import gather
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import check_devices, infer, made_by, overlap, plan_over, result_of
from anytorch.webgpu.tensors import KEY, aten, new_tensor


def cat_out(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: torch.Tensor) -> torch.Tensor:
    """torch has checked the shapes and sized `out`; each input is copied to its part."""
    if out.numel() == 0:
        return out
    at = 0
    dim = dim % out.dim()
    for number, tensor in enumerate(tensors):
        if overlap(tensor, out):
            raise RuntimeError(
                "unsupported operation: the input tensors cannot refer to any of the output memory locations. "
                f"Found overlap in input tensor {number}."
            )
    for tensor in tensors:
        if tensor.dim() == 1 and tensor.numel() == 0:
            continue  # torch lets an empty vector join anything
        length = tensor.size(dim)
        if length == 0:
            continue
        check_devices("aten::cat", tensor)
        on_device(tensor, out.narrow(dim, at, length))
        at += length
    return out


MOST_JOINED = 7  # inputs; every adapter binds eight buffers
ONE_BY_ONE = "these tensors are copied one by one"


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    addresses = []
    ours, low = TAG, 0
    key: list[Any] = ["cat", dim]
    for tensor in tensors:
        address = tensor.data_ptr()
        addresses.append(address)
        ours &= address
        low |= address
        key += (tensor.dtype, tensor.size(), tensor.stride())
    key.append(low & 15)
    identity = tuple(key)
    plan = plans[identity]
    if ours and type(plan) is Plan:  # and none is empty
        try:
            return made_by(plan, addresses)
        except BindingTooLarge:
            pass  # copies are made in windows
    like: torch.Tensor = infer(aten.cat.default, list(tensors), dim)  # torch's own errors
    if ours and plan is None:
        plans[identity] = _join(tensors, dim, like, low)
    return cat_out(tensors, dim, out=new_tensor(like.size(), like.stride(), like.dtype))


def _join(tensors: Sequence[torch.Tensor], dim: int, like: torch.Tensor, low: int) -> Plan | str:
    """The plan of a `cat` in one launch."""
    if not 2 <= len(tensors) <= MOST_JOINED or not like.is_contiguous() or like.numel() >= 2**31:
        return ONE_BY_ONE
    if any(tensor.dtype is not like.dtype for tensor in tensors):
        return ONE_BY_ONE
    sizes, strides, axis = merge([t.size() for t in tensors], [t.stride() for t in tensors], dim % like.dim())
    itemsize = like.dtype.itemsize
    unit = unit_of(itemsize, sizes, strides, (low & 15) // itemsize)
    kernel = Cat(unit or 0, len(tensors), len(sizes[0]), axis)
    if unit is None or kernel.words > MOST_WORDS:
        return ONE_BY_ONE
    factor = unit // itemsize
    for size, step in zip(sizes, strides, strict=True):
        size[-1] //= factor
        step[:-1] = [length // factor for length in step[:-1]]
    starts = [sum(size[axis] for size in sizes[:j]) for j in range(len(sizes))]
    whole = list(sizes[0])
    whole[axis] = sum(size[axis] for size in sizes)
    return plan_over(
        math.prod(whole),
        kernel,
        render,
        [unit] * len(tensors),
        1 << len(tensors),
        WORKGROUP,
        unplaced=1,
        tail=(*whole, *starts[1:], *[length for step in strides for length in step]),
        result=result_of(like.size(), like.dtype, like.stride()),
    )


def flip(source: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A strided copy that walks some dimensions backwards."""
    rank = max(source.dim(), 1)
    chosen = {dim % rank for dim in dims if -rank <= dim < rank}
    if len(chosen) != len(dims):
        aten.flip.default(torch.empty(source.shape, device="meta"), dims)  # raises torch's own error
    if source.dim() == 0 or source.numel() == 0:
        return source.clone()
    steps = list(source.stride())
    start = 0
    for dim in chosen:
        start += (source.size(dim) - 1) * steps[dim]
        steps[dim] = -steps[dim]
    return gather(source, source.size(), steps, offset=start)


def roll(source: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    if not shifts:
        raise RuntimeError("`shifts` required")
    if not dims:
        if len(shifts) != 1:
            raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:0")
        return roll(source.reshape(-1), shifts, (0,)).reshape(source.shape)
    if len(shifts) != len(dims):
        raise RuntimeError(f"shifts and dimensions must align. shifts: {len(shifts)}, dims:{len(dims)}")
    result = source
    for shift, dim in zip(shifts, dims, strict=True):
        length = result.size(dim)
        by = shift % length if length else 0
        if by:
            result = torch.cat((result.narrow(dim, length - by, by), result.narrow(dim, 0, length - by)), dim)
    return source.clone(memory_format=torch.contiguous_format) if result is source else result


def register(library: torch.library.Library) -> None:
    register_kernels(library, {"cat.out": cat_out, "flip": flip, "roll": roll})
    library.impl("cat", cat, KEY)
