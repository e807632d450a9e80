"""Writing at places that index tensors name: index_put, scatter, index_add and similar ops, put.

Combining is done by atomics on 32-bit floats and integers (64-bit sums by two words and a carry); half and narrow types are
combined in 32 bits beside and copied back. The order of float sums is the GPU's: results may differ in the last place from
run to run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import alert_not_deterministic

from anytorch.webgpu.dtypes import spoken
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_apart, check_writable, expanded
from anytorch.webgpu.ops.indexing import (
    INDEX_DTYPES,
    Place,
    advanced,
    along,
    check_index,
    combinable,
    constant,
    flat_place,
    on_dimension,
    ours,
    selecting,
)
from anytorch.webgpu.oversize import check_bindable
from anytorch.webgpu.tensors import aten, device


def index_put_impl(
    target: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    op = aten._index_put_impl_.default
    values = ours(op, values)
    if expanded(target):
        warnings.warn(EXPANDED, stacklevel=2)
    same = values.dtype is target.dtype
    present = [index for index in indices if index is not None]
    mask = present[0] if len(present) == 1 and indices[0] is present[0] else None
    fills = mask is not None and mask.dtype is torch.bool and values.numel() == 1 and not accumulate
    if not expanded(target):  # a value that fills is taken before anything is written
        check_apart(target, None if fills else values, *indices)
    if fills and mask is not None and list(mask.shape) == list(target.shape[: mask.dim()]):
        # The commonest form, x[mask] = value, needs no positions, so no wait for the device.
        shaped = mask.to(device()).reshape(list(mask.shape) + [1] * (target.dim() - mask.dim()))
        return target.masked_fill_(shaped, values.reshape(()).to(target.dtype))
    if same and accumulate and not combinable(target.dtype, "sum"):
        raise NoKernel
    place = advanced(target, indices)
    try:
        values.expand(list(place.size))
    except RuntimeError as exc:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape "
            f"{list(place.size)}"
        ) from exc
    if not same:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, "
            f"got {spoken(target.dtype)} for the destination and {spoken(values.dtype)} for the source."
        )
    place = place if unsafe else place.checked(op, target)
    if accumulate:
        place.combine(target, values, "sum")
    else:
        place.write(target, values)
    return target


def start(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """An `out=` kernel that changes a copy of its first argument; in place they are one tensor."""
    if out.data_ptr() != source.data_ptr() or out.stride() != source.stride() or out.shape != source.shape:
        out.copy_(source)
    return out


EXPANDED = (  # torch's own words
    "Use of index_put_ on expanded tensors is deprecated. Please clone() the tensor before performing this operation. "
    "This also applies to advanced indexing e.g. tensor[indices] = tensor"
)
SUMS = {"add": "sum", "multiply": "prod"}  # what scatter calls them


def _scatter(op: Any, mode: str = "") -> Callable[..., torch.Tensor]:
    """`scatter`, whose index has the target's rank, `index_add`, whose index names whole slices, and similar ops. They start
    `out` from the target and write the source at the place in it, or combine it there. Without a `mode` it is the op's own
    argument."""
    slices = op._opname.startswith("index_")

    def kernel(
        target: torch.Tensor,
        dim: int,
        index: torch.Tensor,
        source: Any,
        reduce: str = "",
        *,
        alpha: Any = 1,
        include_self: bool = True,
        out: torch.Tensor,
    ) -> torch.Tensor:
        _, axis = on_dimension(target, dim)
        chosen = mode or SUMS.get(reduce, reduce)
        if index.numel() == 0 and index.dtype in INDEX_DTYPES:  # of whatever rank
            return start(out, target)
        walked = index.unsqueeze(0) if index.dim() == 0 else index
        if isinstance(source, torch.Tensor):
            source = ours(op, source)
            source = source.unsqueeze(0) if source.dim() == 0 else source
            if not slices:  # the walk is over the index, which may be smaller than the source
                source = source.as_strided(walked.shape, source.stride(), source.storage_offset())
            elif alpha != 1:
                source = source * alpha
        if (chosen != "set" and not combinable(target.dtype, chosen)) or out.dtype is not target.dtype:
            raise NoKernel
        check_index(op, index)
        whole = out.unsqueeze(0) if out.dim() == 0 else out
        place = (selecting(whole, axis, index) if slices else along(axis, walked)).checked(op, whole)
        if out.numel() and target.numel():
            values = source if isinstance(source, torch.Tensor) else constant(source, target.dtype)
            start(out, target)
            reduced(place, whole, values, chosen, include_self)
        return out

    return kernel


def reduced(place: Place, target: torch.Tensor, source: torch.Tensor, mode: str, include_self: bool) -> None:
    if mode == "set":
        place.write(target, source)
        return
    check_bindable(target, source)  # all steps, or none
    if mode == "mean" and target.dtype in (torch.float16, torch.bfloat16):  # rounded once
        wide = target.float()
        reduced(place, wide, source.float(), mode, include_self)
        target.copy_(wide)
        return
    if not include_self:
        place.write(target, constant(identity(target.dtype, mode), target.dtype))
    place.combine(target, source, "sum" if mode == "mean" else mode)
    if mode == "mean":
        counts = torch.full(target.shape, int(include_self), dtype=torch.int32, device=device())
        place.write(counts, constant(1, torch.int32), "sum")
        counts.clamp_(min=1)
        rounding = None if target.is_floating_point() else "floor"
        target.copy_(torch.div(target, counts, rounding_mode=rounding))


def identity(dtype: torch.dtype, mode: str) -> Any:
    if mode in ("sum", "mean"):
        return 0
    if mode == "prod":
        return 1
    if dtype is torch.bool:
        return mode == "amin"
    if dtype.is_floating_point:
        return float("inf") if mode == "amin" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if mode == "amin" else limits.min


def index_fill(target: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """With a number, or a tensor of one."""
    op = aten.index_fill_.int_Scalar
    if isinstance(value, torch.Tensor):
        if value.dim():
            raise RuntimeError(
                f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s)."
            )
        value = ours(op, value).to(target.dtype)
    if isinstance(value, complex) and not target.is_complex():
        raise RuntimeError("index_fill_(): Converting complex Scalar to non-complex type is not supported")
    whole, axis = on_dimension(target, dim)
    check_index(op, index)
    if expanded(target):
        warnings.warn(EXPANDED.replace("index_put_", "index_fill_"), stacklevel=2)
    else:
        check_apart(target, index)
    values = value if isinstance(value, torch.Tensor) else constant(value, target.dtype)
    selecting(whole, axis, index).checked(op, whole).write(whole, values)
    return target


def put(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    op = aten.put_.default
    check_index(op, index)
    if (accumulate and not combinable(target.dtype, "sum")) or target.dtype is not source.dtype:
        raise NoKernel
    if index.numel() != source.numel():
        raise RuntimeError(
            f"put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{source.numel()}, index.numel() = {index.numel()}"
        )
    if accumulate and target.dtype.is_floating_point and torch.are_deterministic_algorithms_enabled():
        raise NoKernel  # the order of sums is the GPU's; the CPU has one
    if not accumulate:
        alert_not_deterministic("put_")
    check_writable(target)
    check_apart(target, source, index)
    flat = target.reshape(-1)
    place = flat_place(index.reshape(-1)).checked(op, flat)
    values = ours(op, source).reshape(-1)
    if accumulate:
        place.combine(flat, values, "sum")
    else:
        place.write(flat, values)
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.reshape(target.shape))
    return target


KERNELS: dict[str, Callable[..., Any]] = {
    "_index_put_impl_": index_put_impl,
    "scatter.src_out": _scatter(aten.scatter.src_out, "set"),
    "scatter.value_out": _scatter(aten.scatter.value_out, "set"),
    "scatter.reduce_out": _scatter(aten.scatter.reduce_out),
    "scatter.value_reduce_out": _scatter(aten.scatter.value_reduce_out),
    "scatter_add.out": _scatter(aten.scatter_add.out, "sum"),
    "scatter_reduce.two_out": _scatter(aten.scatter_reduce.two_out),
    "index_add.out": _scatter(aten.index_add.out, "sum"),
    "index_copy.out": _scatter(aten.index_copy.out, "set"),
    "index_reduce.out": _scatter(aten.index_reduce.out),
    "index_fill_.int_Scalar": index_fill,
    "index_fill_.int_Tensor": index_fill,
    "put_": put,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
