"""Indexing: index, index_put, gather, scatter, take, put, index_*, embedding's gradient, masked_*, nonzero.

Every one of them is a `Place`: a walk over some size, which target dimensions it walks, and which index tensors name the
position in the others. Reading there is gather, writing there is scatter, combining there is scatter_add and its kin.

An index out of range reads zero and writes nothing. Finding it would cost a wait for the device per op; with
ANYTORCH_WEBGPU_CHECK=1 every index tensor is looked at and IndexError raised, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from anytorch import config
from anytorch.webgpu import places
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.tensors import NAME, aten, device

INDEX_DTYPES = (torch.int64, torch.int32)


@lru_cache(maxsize=1)
def checking() -> bool:
    """Read once: a setting costs more than the launch of a small kernel."""
    return bool(config.get("webgpu_check"))


@dataclass(frozen=True)
class Place:
    size: Sequence[int]  # of the walk
    axes: Sequence[int | None]  # per dimension of the walk: the target's dimension it walks
    indices: Sequence[
        tuple[torch.Tensor, Sequence[int], int]
    ]  # tensor, its strides in the walk, the dimension it indexes
    wrap: bool = False

    def _strides(self, target: torch.Tensor) -> list[int]:
        steps = target.stride()
        return [0 if axis is None else steps[axis] for axis in self.axes]

    def _entries(self, target: torch.Tensor) -> list[places.Index]:
        return [(index, steps, target.size(dim), target.stride(dim)) for index, steps, dim in self.indices]

    def check(self, op: Any, target: torch.Tensor) -> None:
        if not checking():
            return
        for index, _, dim in self.indices:
            size = target.size(dim)
            if index.numel() == 0:
                continue
            low, high = int(index.amin().item()), int(index.amax().item())
            if high >= size or low < (-size if self.wrap else 0):
                wrong = high if high >= size else low
                raise IndexError(f"{op}: index {wrong} is out of bounds for dimension {dim} with size {size}")

    def read(self, source: torch.Tensor) -> torch.Tensor | None:
        return places.gather(source, self.size, self._strides(source), self._entries(source), wrap=self.wrap)

    def write(self, target: torch.Tensor, source: torch.Tensor, mode: str = "set") -> bool:
        """`source` is broadcast to the walk. False: no kernel for this."""
        if 0 in self.size or target.numel() == 0:
            return True
        steps = source.expand(self.size).stride()
        return places.scatter(
            target, self._strides(target), source, steps, self.size, self._entries(target), mode=mode, wrap=self.wrap
        )

    def combine(self, target: torch.Tensor, source: torch.Tensor, mode: str) -> bool:
        """Like `write`, for every dtype that can be combined in 32 bits, beside if need be."""
        if 0 in self.size or target.numel() == 0:
            return True
        if target.dtype in (torch.float32, torch.int32) or (target.dtype is torch.int64 and mode == "sum"):
            return self.write(target, source.to(target.dtype), mode)
        if target.dtype in (torch.float16, torch.bfloat16):
            wide = torch.float32
        elif target.dtype in (torch.bool, torch.int8, torch.uint8, torch.int16):
            wide = torch.int32
        else:
            return False
        beside = target.to(wide, memory_format=torch.contiguous_format)
        if not self.write(beside, source.to(wide), mode):
            return False
        target.copy_(beside)
        return True


def on_dimension(target: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """A 0-dim tensor is one of a single element; and the dimension counted from the front."""
    whole = target.unsqueeze(0) if target.dim() == 0 else target
    if not -whole.dim() <= dim < whole.dim():
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-whole.dim()}, {whole.dim() - 1}], but got {dim})"
        )
    return whole, dim % whole.dim()


def along(dim: int, index: torch.Tensor) -> Place:
    """gather and scatter: the index has the target's rank and names the position in one dimension."""
    axes = [None if d == dim else d for d in range(index.dim())]
    return Place(index.size(), axes, [(index, index.stride(), dim)])


def selecting(target: torch.Tensor, dim: int, index: torch.Tensor) -> Place:
    """index_select and index_add: a one-dimensional index names whole slices."""
    flat = index.reshape(-1)
    size = list(target.size())
    size[dim] = flat.numel()
    steps = [0] * len(size)
    steps[dim] = flat.stride(0)
    return Place(size, [None if d == dim else d for d in range(len(size))], [(flat, steps, dim)])


def on_the_cpu(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = fallback(op, *args, **kwargs)
    return result


def ours(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A CPU scalar comes along; any other tensor of another device is an error."""
    if tensor.device.type == NAME:
        return tensor
    if tensor.dim() == 0:
        return tensor.to(device())
    raise RuntimeError(f"{op}: expected all tensors to be on {NAME}, but one is on {tensor.device}")


def usable(op: Any, index: torch.Tensor) -> bool:
    """Can our kernels read this index? On another device it is the user's error."""
    if index.device.type != NAME:
        ours(op, index)
        return False
    return index.dtype in INDEX_DTYPES


def constant(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:  # no shader writes one
        return torch.tensor(value, dtype=dtype).to(device())
    return torch.full((), value, dtype=dtype, device=device())


# --- index and index_put -----------------------------------------------------------------------------------------


def advanced(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Place | None:
    """`target[indices]`: None walks a dimension, a bool tensor is the positions where it is set, the rest broadcast."""
    found: list[tuple[int, torch.Tensor]] = []
    dim = 0
    for number, index in enumerate(indices):
        if index is None:
            dim += 1
            continue
        if index.device.type != NAME:
            index = index.to(device())  # torch lets CPU indices select from any device's tensor
        if index.dtype in (torch.bool, torch.uint8):
            for d in range(index.dim()):
                if dim + d >= target.dim() or index.size(d) != target.size(dim + d):
                    raise IndexError(
                        f"The shape of the mask {list(index.shape)} at index {d} does not match the shape of the indexed "
                        f"tensor {list(target.shape)} at index {number + d}"
                    )
            chosen = places.positions(index if index.dtype is torch.bool else index.ne(0))
            if chosen is None:
                return None
            found += [(dim + d, column) for d, column in enumerate(chosen.unbind(1))]
            dim += index.dim()
            continue
        if index.dtype not in INDEX_DTYPES:
            raise IndexError("tensors used as indices must be long, int, byte or bool tensors")
        found.append((dim, index))
        dim += 1
    if dim > target.dim():
        raise IndexError(f"too many indices for tensor of dimension {target.dim()}")
    try:
        shape = torch.broadcast_shapes(*[index.shape for _, index in found])
    except RuntimeError as exc:
        shapes = ", ".join(str(list(index.shape)) for _, index in found)
        raise IndexError(
            f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
        ) from exc
    indexed = [d for d, _ in found]
    for d in indexed:
        if target.size(d) == 0 and 0 not in shape:
            raise IndexError(f"index is out of bounds for dimension with size {target.size(d)}")
    walked = [d for d in range(target.dim()) if d not in indexed]
    # Adjacent indices leave their result where they stood; others move it to the front.
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1)) if indexed else True
    at = sum(d < indexed[0] for d in walked) if indexed and adjacent else 0
    before, after = walked[:at], walked[at:]
    size = [*[target.size(d) for d in before], *shape, *[target.size(d) for d in after]]
    axes = [*before, *[None] * len(shape), *after]
    entries = [
        (index, [0] * len(before) + list(index.expand(shape).stride()) + [0] * len(after), d) for d, index in found
    ]
    return Place(size, axes, entries, wrap=True)


def index_tensor(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    op = aten.index.Tensor
    place = advanced(ours(op, target), indices)
    if place is None:
        return on_the_cpu(op, target, indices)
    place.check(op, target)
    read = place.read(target)
    return on_the_cpu(op, target, indices) if read is None else read


def index_out(target: torch.Tensor, indices: Sequence[torch.Tensor | None], *, out: torch.Tensor) -> torch.Tensor:
    return into(out, index_tensor(target, indices))


def into(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What an `out=` form does with the functional form's result."""
    if out.shape != result.shape:
        torch._prims_common.wrappers._maybe_resize_out(out, result.shape)
    return out.copy_(result)


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
    place = advanced(target, indices)
    if place is None:
        return on_the_cpu(op, target, indices, values, accumulate, unsafe)
    try:
        values.expand(list(place.size))
    except RuntimeError as exc:
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(values.shape)} cannot be broadcast to indexing result of shape "
            f"{list(place.size)}"
        ) from exc
    place.check(op, target)
    done = place.combine(target, values, "sum") if accumulate else place.write(target, values)
    return target if done else on_the_cpu(op, target, indices, values, accumulate, unsafe)


# --- one dimension -----------------------------------------------------------------------------------------------


def gather_out(
    source: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool = False, *, out: torch.Tensor
) -> torch.Tensor:
    op = aten.gather.out
    if out.numel() == 0:
        return out
    whole, dim = on_dimension(ours(op, source), dim)
    if not usable(op, index):
        return on_the_cpu(op, source, dim, index, sparse_grad=sparse_grad, out=out)
    place = along(dim, index.unsqueeze(0) if index.dim() == 0 else index)
    place.check(op, whole)
    read = place.read(whole)
    if read is None:
        return on_the_cpu(op, source, dim, index, sparse_grad=sparse_grad, out=out)
    return out.copy_(read.reshape(index.shape))


def index_select(source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    op = aten.index_select.default
    whole, dim = on_dimension(ours(op, source), dim)
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if not usable(op, index):
        if index.dtype not in INDEX_DTYPES:
            raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
        index = ours(op, index)
    place = selecting(whole, dim, index)
    place.check(op, whole)
    read = place.read(whole)
    if read is None:
        read = on_the_cpu(op, source, dim, index)
    return read.reshape(()) if source.dim() == 0 else read


def index_select_out(source: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return into(out, index_select(source, dim, index))


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
    write: Callable[[torch.Tensor], bool],
    again: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Start `out` from `first` and let `write` change it; `again` is the fallback."""
    if index.numel() == 0 and out.dtype is first.dtype:
        return start(out, first)
    if not usable(op, index) or (out.dtype is not first.dtype):
        return again()
    if out.numel() and first.numel():
        kept = out if out.data_ptr() != first.data_ptr() else None
        start(out, first)
        if not write(out.unsqueeze(0) if out.dim() == 0 else out):
            if kept is None:
                raise RuntimeError(f"{op}: this adapter cannot bind a tensor of {out.numel():,} elements")
            return again()
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


def combinable(dtype: torch.dtype, mode: str) -> bool:
    if dtype is torch.int64:
        return mode in ("sum", "mean", "set")
    narrow = (torch.bool, torch.int8, torch.uint8, torch.int16)
    return dtype in (torch.float32, torch.int32, torch.float16, torch.bfloat16, *narrow)


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

    def write(whole: torch.Tensor) -> bool:
        place = along(axis, places_index)
        place.check(op, whole)
        return reduced(place, whole, source, mode, include_self)

    return written(op, out, target, index, write, again)


def reduced(place: Place, target: torch.Tensor, source: torch.Tensor, mode: str, include_self: bool) -> bool:
    if mode == "set":
        return place.write(target, source)
    if not include_self:
        start_value = constant(identity(target.dtype, mode), target.dtype)
        if not place.write(target, start_value):
            return False
    if not place.combine(target, source, "sum" if mode == "mean" else mode):
        return False
    if mode == "mean":
        counts = torch.full(target.shape, int(include_self), dtype=torch.int32, device=device())
        if not place.write(counts, constant(1, torch.int32), "sum"):
            return False
        counts.clamp_(min=1)
        rounding = None if target.is_floating_point() else "floor"
        target.copy_(torch.div(target, counts, rounding_mode=rounding))
    return True


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

    def write(whole: torch.Tensor) -> bool:
        values = ours(op, source)
        values = values.reshape(1) if values.dim() == 0 else values
        place = selecting(whole, axis, index)
        place.check(op, whole)
        return reduced(place, whole, values, mode, include_self)

    return written(op, out, target, index, write, again)


def index_fill_scalar(target: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    op = aten.index_fill_.int_Scalar
    whole, axis = on_dimension(target, dim)
    if not usable(op, index):
        return on_the_cpu(op, target, dim, index, value)
    place = selecting(whole, axis, index)
    place.check(op, whole)
    if not place.write(whole, constant(value, target.dtype)):
        return on_the_cpu(op, target, dim, index, value)
    return target


def index_fill_tensor(target: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim():
        raise RuntimeError(
            f"index_fill_ only supports a 0-dimensional value tensor, but got tensor with {value.dim()} dimension(s)."
        )
    op = aten.index_fill_.int_Tensor
    whole, axis = on_dimension(target, dim)
    place = selecting(whole, axis, index) if usable(op, index) else None
    if place is None or not place.write(whole, ours(op, value).to(target.dtype)):
        return on_the_cpu(op, target, dim, index, value)
    return target


# --- flat ----------------------------------------------------------------------------------------------------------


def flat_place(index: torch.Tensor) -> Place:
    return Place(index.size(), [None] * index.dim(), [(index, index.stride(), 0)], wrap=True)


def take(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    op = aten.take.default
    if not usable(op, index):
        return on_the_cpu(op, source, index)
    if source.numel() == 0 and index.numel():
        raise IndexError("take(): tried to take from an empty tensor")
    place, flat = flat_place(index), ours(op, source).reshape(-1)
    place.check(op, flat)
    read = place.read(flat)
    return on_the_cpu(op, source, index) if read is None else read


def take_out(source: torch.Tensor, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return into(out, take(source, index))


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
    done = place.combine(flat, values, "sum") if accumulate else place.write(flat, values)
    if not done:
        return on_the_cpu(op, target, index, source, accumulate)
    if flat.data_ptr() != target.data_ptr():
        target.copy_(flat.reshape(target.shape))
    return target


KERNELS: dict[str, Callable[..., Any]] = {
    "index.Tensor": index_tensor,
    "index.Tensor_out": index_out,
    "_unsafe_index.Tensor": index_tensor,
    "_index_put_impl_": index_put_impl,
    "gather.out": gather_out,
    "index_select": index_select,
    "index_select.out": index_select_out,
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
    "take": take,
    "take.out": take_out,
    "put_": put,
}


def register(library: torch.library.Library) -> None:
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
