"""Putting tensors together and turning them round: cat, flip and roll.

stack, repeat, pad, the *_scatter and *_backward ops of views and tile need nothing here: torch makes them of copies into
views, which are our own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, TAG
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.runtime import device_memory, open_runtime
from anytorch.gpu.wgsl.cat import MOST_WORDS, WORKGROUP, Cat, merge, render, unit_of
from anytorch.webgpu import places
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import to_meta
from anytorch.webgpu.pointwise import MOST_GROUPS
from anytorch.webgpu.tensors import NAME, aten, is_ours, new_tensor, sized_tensor, storage_nbytes


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do two tensors' spans of memory meet?"""
    if not (is_ours(one) and one.numel() and other.numel()) or one.data_ptr() >> SHIFT != other.data_ptr() >> SHIFT:
        return False

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((length - 1) * step for length, step in zip(tensor.size(), tensor.stride(), strict=True))
        first = int(tensor.storage_offset()) * tensor.dtype.itemsize
        return first, first + (last + 1) * tensor.dtype.itemsize

    (first, end), (start, stop) = span(one), span(other)
    return first < stop and start < end


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
        if tensor.device.type != NAME:
            raise RuntimeError(f"aten::cat: expected all tensors to be on {NAME}, but one is on {tensor.device}")
        on_device(tensor, out.narrow(dim, at, length))
        at += length
    return out


class Joined:
    """A `cat` seen before, in one launch."""

    __slots__ = ("factor", "head", "nbytes", "offsets", "pack", "program", "result", "shift", "tail", "x", "y")

    def __init__(self, kernel: Cat, like: torch.Tensor, sizes: list[list[int]], strides: list[list[int]]) -> None:
        runtime = open_runtime()
        self.program = runtime.programs.make(
            kernel,
            lambda: render(kernel),
            buffers=kernel.inputs + 1,
            writable=1 << kernel.inputs,
            immediates=4 * kernel.words,
        )
        factor = kernel.unit // like.dtype.itemsize
        for size, step in zip(sizes, strides, strict=True):
            size[-1] //= factor
            step[:-1] = [length // factor for length in step[:-1]]
        starts = [sum(size[kernel.axis] for size in sizes[:j]) for j in range(len(sizes))]
        whole = list(sizes[0])
        whole[kernel.axis] = sum(size[kernel.axis] for size in sizes)
        count = math.prod(whole)
        groups = -(-count // WORKGROUP)
        self.x = min(groups, MOST_GROUPS)
        self.y = -(-groups // self.x)
        self.shift = kernel.unit.bit_length() - 1
        self.head = struct.pack("<2I", count, self.x * WORKGROUP)
        self.offsets = [start * step[kernel.axis] for start, step in zip(starts, strides, strict=True)]
        self.pack = struct.Struct(f"<{kernel.inputs}I").pack
        numbers = [*whole, *starts[1:], *[length for step in strides for length in step]]
        self.tail = struct.pack(f"<{len(numbers)}I", *numbers)
        self.result = (tuple(like.size()), tuple(like.stride()), like.dtype)
        self.nbytes = storage_nbytes(*self.result)

    def __call__(self, addresses: Sequence[int]) -> torch.Tensor:
        made = sized_tensor(*self.result, self.nbytes)
        runtime = open_runtime()
        table, shift = runtime.buffers, self.shift
        bound = [table[address >> SHIFT] for address in addresses]
        bound.append(table[made.data_ptr() >> SHIFT])
        places = [
            ((address & OFFSET_MASK) >> shift) - start & 0xFFFFFFFF
            for address, start in zip(addresses, self.offsets, strict=True)
        ]
        runtime.dispatch(self.program, bound, self.head + self.pack(*places) + self.tail, self.x, self.y)
        return made


_joined: dict[Any, Joined | None] = device_memory()  # None: copied one by one
MOST_JOINED = 7  # inputs; every adapter binds eight buffers


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    addresses = [tensor.data_ptr() for tensor in tensors]
    ours, low = TAG, 0
    key: list[Any] = [dim]
    for address, tensor in zip(addresses, tensors, strict=True):
        ours &= address
        low |= address
        key += (tensor.dtype, tensor.size(), tensor.stride())
    key.append(low & 15)
    identity = tuple(key)
    if ours:  # and none is empty
        known = _joined.get(identity)
        if known is not None:
            try:
                return known(addresses)
            except BindingTooLarge:
                pass  # copies are made in windows
    like: torch.Tensor = aten.cat.default([to_meta(tensor) for tensor in tensors], dim)  # torch's own errors
    if ours and identity not in _joined:
        _joined[identity] = _join(tensors, dim, like, low)
    return cat_out(tensors, dim, out=new_tensor(like.size(), like.stride(), like.dtype))


def _join(tensors: Sequence[torch.Tensor], dim: int, like: torch.Tensor, low: int) -> Joined | None:
    if not 2 <= len(tensors) <= MOST_JOINED or not like.is_contiguous() or like.numel() >= 2**31:
        return None
    if any(tensor.dtype is not like.dtype for tensor in tensors):
        return None
    sizes, strides, axis = merge([t.size() for t in tensors], [t.stride() for t in tensors], dim % like.dim())
    itemsize = like.dtype.itemsize
    unit = unit_of(itemsize, sizes, strides, (low & 15) // itemsize)
    if unit is None:
        return None
    kernel = Cat(unit, len(tensors), len(sizes[0]), axis)
    return Joined(kernel, like, sizes, strides) if kernel.words <= MOST_WORDS else None


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
    result = places.gather(source, source.size(), steps, offset=start)
    if result is None:
        result = fallback(aten.flip.default, source, dims)
    return result


def roll(source: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
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
    library.impl("cat", cat, "PrivateUse1")
    library.impl("cat.out", cat_out, "PrivateUse1")
    library.impl("flip", flip, "PrivateUse1")
    library.impl("roll", roll, "PrivateUse1")
