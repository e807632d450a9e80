"""Writing at places that index tensors name: index_put, scatter, index_add and their kin, put.

Combining is done by atomics on 32-bit floats and integers (64-bit sums by two words and a carry); half and narrow types are
combined in 32 bits beside and copied back. The order of float sums is the GPU's: results may differ in the last place from
run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.ops.indexing import (
    Place,
    advanced,
    along,
    combinable,
    constant,
    flat_place,
    on_dimension,
    on_the_cpu,
    ours,
    selecting,
    usable,
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
    if values.dtype is not target.dtype:
        raise RuntimeError(
            "Index put requires the source and destination dtypes match, "
            f"got {target.dtype} for the destination and {values.dtype} for the source."
        )
    values = ours(op, values)
    present = [index for index in indices if index is not None]
    mask = present[0] if len(present) == 1 and indices[0] is present[0] else None
    fills = mask is not None and mask.dtype is torch.bool and values.numel() == 1 and not accumulate
    if fills and mask is not None and list(mask.shape) == list(target.shape[: mask.dim()]):
        # The commonest form, x[mask] = value, needs no positions, so no wait for the device.
        shaped = mask.to(device()).reshape(list(mask.shape) + [1] * (target.dim() - mask.dim()))
        return target.masked_fill_(shaped, values.reshape(()))
    if accumulate and not combinable(target.dtype, "sum"):
        return on_the_cpu(op, target, indices, values, accumulate, unsafe)
    place = advanced(target, indices)
    try:
        values.expand(list(place.size))
    except RuntimeError as exc:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape "
            f"{list(place.size)}"
        ) from exc
    place.check(op, target)
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


def written(
    op: Any,
    out: torch.Tensor,
    first: torch.Tensor,
    index: torch.Tensor,
    write: Callable[[torch.Tensor], None],
    again: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Start `out` from `first` and let `write` change it; `again` is the fallback."""
    if index.numel() == 0 and out.dtype is first.dtype:
        return start(out, first)
    if not usable(op, index) or (out.dtype is not first.dtype):
        return again()
    if out.numel() and first.numel():
        start(out, first)
        write(out.unsqueeze(0) if out.dim() == 0 else out)
    return out


def scatter_src(
    target: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    return _scatter(aten.scatter.src_out, target, dim, index, src, "set", True, out)


def scatter_value(
    target: torch.Tensor, dim: int, index: torch.Tensor, value: Any, *, out: torch.Tensor
) -> torch.Tensor:
    return _scatter(aten.scatter.value_out, target, dim, index, value, "set", True, out)


def scatter_with(
    target: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, reduce: str, out: torch.Tensor
) -> torch.Tensor:
    mode = {"add": "sum", "multiply": "prod"}[reduce]
    return _scatter(aten.scatter.reduce_out, target, dim, index, src, mode, True, out, reduce=reduce)


def scatter_value_with(
    target: torch.Tensor, dim: int, index: torch.Tensor, value: Any, *, reduce: str, out: torch.Tensor
) -> torch.Tensor:
    mode = {"add": "sum", "multiply": "prod"}[reduce]
    return _scatter(aten.scatter.value_reduce_out, target, dim, index, value, mode, True, out, reduce=reduce)


def scatter_add(
    target: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    return _scatter(aten.scatter_add.out, target, dim, index, src, "sum", True, out)


def scatter_reduce(
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: torch.Tensor,
) -> torch.Tensor:
    op = aten.scatter_reduce.two_out
    if not combinable(target.dtype, reduce):
        return on_the_cpu(op, target, dim, index, src, reduce, include_self=include_self, out=out)
    return _scatter(op, target, dim, index, src, reduce, include_self, out)


def _scatter(
    op: Any,
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    src: Any,
    mode: str,
    include_self: bool,
    out: torch.Tensor,
    **extra: Any,
) -> torch.Tensor:
    def again() -> torch.Tensor:
        return on_the_cpu(op, target, dim, index, src, **extra, out=out)

    if mode != "set" and not combinable(target.dtype, mode):
        return again()
    _, axis = on_dimension(target, dim)
    places_index = index.unsqueeze(0) if index.dim() == 0 else index
    if not isinstance(src, torch.Tensor):
        source = constant(src, target.dtype)
    else:
        source = ours(op, src)
        source = source.unsqueeze(0) if source.dim() == 0 else source
        # The walk is over the index, which may be smaller than the source.
        source = source.as_strided(places_index.shape, source.stride(), source.storage_offset())

    def write(whole: torch.Tensor) -> None:
        place = along(axis, places_index)
        place.check(op, whole)
        reduced(place, whole, source, mode, include_self)

    return written(op, out, target, index, write, again)


def reduced(place: Place, target: torch.Tensor, source: torch.Tensor, mode: str, include_self: bool) -> None:
    if mode == "set":
        place.write(target, source)
        return
    check_bindable(target, source)  # all steps, or none
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


def index_add(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1, out: torch.Tensor
) -> torch.Tensor:
    op = aten.index_add.out

    def again() -> torch.Tensor:
        return on_the_cpu(op, target, dim, index, source, alpha=alpha, out=out)

    scaled = source if alpha == 1 else source * alpha
    return _on_slices(op, target, dim, index, scaled, "sum", True, out, again)


def index_copy(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, out: torch.Tensor
) -> torch.Tensor:
    op = aten.index_copy.out
    return _on_slices(
        op, target, dim, index, source, "set", True, out, lambda: on_the_cpu(op, target, dim, index, source, out=out)
    )


def index_reduce(
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: torch.Tensor,
) -> torch.Tensor:
    op = aten.index_reduce.out

    def again() -> torch.Tensor:
        return on_the_cpu(op, target, dim, index, source, reduce, include_self=include_self, out=out)

    return _on_slices(op, target, dim, index, source, reduce, include_self, out, again)


def _on_slices(
    op: Any,
    target: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    mode: str,
    include_self: bool,
    out: torch.Tensor,
    again: Callable[[], torch.Tensor],
) -> torch.Tensor:
    if mode != "set" and not combinable(target.dtype, mode):
        return again()
    _, axis = on_dimension(target, dim)

    def write(whole: torch.Tensor) -> None:
        values = ours(op, source)
        values = values.reshape(1) if values.dim() == 0 else values
        place = selecting(whole, axis, index)
        place.check(op, whole)
        reduced(place, whole, values, mode, include_self)

    return written(op, out, target, index, write, again)


def index_fill_scalar(target: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    op = aten.index_fill_.int_Scalar
    whole, axis = on_dimension(target, dim)
    if not usable(op, index):
        return on_the_cpu(op, target, dim, index, value)
    place = selecting(whole, axis, index)
    place.check(op, whole)
    place.write(whole, constant(value, target.dtype))
    return target


def index_fill_tensor(target: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim():
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s)."
        )
    op = aten.index_fill_.int_Tensor
    whole, axis = on_dimension(target, dim)
    if not usable(op, index):
        return on_the_cpu(op, target, dim, index, value)
    selecting(whole, axis, index).write(whole, ours(op, value).to(target.dtype))
    return target


def put(target: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    op = aten.put_.default
    if (
        not usable(op, index)
        or (accumulate and not combinable(target.dtype, "sum"))
        or target.dtype is not source.dtype
    ):
        return on_the_cpu(op, target, index, source, accumulate)
    if index.numel() != source.numel():
        raise RuntimeError(
            f"put_(): Expected source and index to have the same number of elements, but got source.numel() = "
            f"{source.numel()}, index.numel() = {index.numel()}"
        )
    flat = target.reshape(-1)
    place = flat_place(index.reshape(-1))
    place.check(op, flat)
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
    "scatter.src_out": scatter_src,
    "scatter.value_out": scatter_value,
    "scatter.reduce_out": scatter_with,
    "scatter.value_reduce_out": scatter_value_with,
    "scatter_add.out": scatter_add,
    "scatter_reduce.two_out": scatter_reduce,
    "index_add.out": index_add,
    "index_copy.out": index_copy,
    "index_reduce.out": index_reduce,
    "index_fill_.int_Scalar": index_fill_scalar,
    "index_fill_.int_Tensor": index_fill_tensor,
    "put_": put,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
