"""Putting tensors together and turning them round: cat, flip and roll.

stack, repeat, pad, the *_scatter and *_backward ops of views and tile need nothing here: torch makes them of copies into
views, which are our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anytorch.gpu.buffers import SHIFT
from anytorch.webgpu import places
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.tensors import NAME, aten, is_ours


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
    library.impl("cat.out", cat_out, "PrivateUse1")
    library.impl("flip", flip, "PrivateUse1")
    library.impl("roll", roll, "PrivateUse1")
