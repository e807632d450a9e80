"""Reading at places that index tensors name: index, gather, index_select, take.

Every op of indexing, here and in `scattering`, is a `Place`: a walk over some size, which target dimensions it walks, and
which index tensors name the position in the others. Reading there is gather, writing there is scatter, combining there is
scatter_add and its kin.

An index out of range reads zero and writes nothing. Finding it would cost a wait for the device per op; with
ANYTORCH_WEBGPU_CHECK=1 every index tensor is looked at and IndexError raised, as on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from anytorch import settings
from anytorch.gpu.buffers import SHIFT, TAG
from anytorch.gpu.runtime import device_memory, open_runtime
from anytorch.webgpu import places
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.tensors import NAME, aten, contiguous_strides, device, sized_tensor, storage_nbytes

INDEX_DTYPES = (torch.int64, torch.int32)


@lru_cache(maxsize=1)
def checking() -> bool:
    """Read once: a setting costs more than the launch of a small kernel."""
    return bool(settings.get("webgpu_check"))


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

    def read(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor | None:
        """The elements there, in a new tensor or in `into` if that can be written as a whole."""
        strides, entries = self._strides(source), self._entries(source)
        return places.gather(source, self.size, strides, entries, wrap=self.wrap, into=into)

    def prepared(self, source: torch.Tensor) -> places.Launch:
        """The launch by which `read` makes a new tensor."""
        start = (int(source.storage_offset()),)
        strides, entries = self._strides(source), self._entries(source)
        return places.prepared("", source.dtype, self.size, (strides,), entries, start, self.wrap)

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
    shares = index.data_ptr() >> SHIFT == out.data_ptr() >> SHIFT
    read = place.read(whole, None if shares or out.dtype is not source.dtype else out)
    if read is None:
        return on_the_cpu(op, source, dim, index, sparse_grad=sparse_grad, out=out)
    return out if read is out else out.copy_(read.reshape(index.shape))


class Selection:
    """Whole slices chosen by an index of known geometry."""

    __slots__ = ("launch", "nbytes", "result")

    def __init__(self, place: Place, source: torch.Tensor, size: Sequence[int]) -> None:
        self.launch = place.prepared(source)
        self.result = (tuple(size), tuple(contiguous_strides(size)), source.dtype)
        self.nbytes = storage_nbytes(*self.result)

    def __call__(self, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        """None: this adapter cannot bind a buffer that large."""
        made = sized_tensor(*self.result, self.nbytes)
        start = (int(source.storage_offset()),)
        return made if self.launch((source, index, made), start, ((index, (), 0, 0),)) else None


_selections: dict[Any, Selection] = device_memory()


def _selected(name: str, source: torch.Tensor, dim: int, index: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """The key of this geometry, and the result if it has been seen before."""
    low, at = source.data_ptr(), index.data_ptr()
    key = (
        *(name, source.dtype, source.size(), source.stride(), low & 15, dim),
        *(index.dtype, index.size(), index.stride(), checking()),
    )
    known = _selections.get(key)
    return key, known(source, index) if known is not None and low & at & TAG else None


def embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """torch makes it of reshape, index_select and view; here it is the launch of the second alone."""
    key, found = _selected("embedding", weight, 0, indices)
    if found is not None:
        return found
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    flat = indices.reshape(-1)
    size = (*indices.shape, weight.shape[1])
    plain = indices.is_contiguous() and indices.dtype in INDEX_DTYPES and weight.numel() and indices.numel()
    if plain and indices.device.type == weight.device.type == NAME and not checking():
        _selections[key] = Selection(selecting(weight, 0, flat), weight, size)
    return index_select(weight, 0, flat).view(size)


def index_select(source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    key, found = _selected("index_select", source, dim, index)
    if found is not None:
        return found
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
    if index.dim() == 1 and whole is source and 0 not in place.size and not checking():
        _selections[key] = Selection(place, source, place.size)
    read = place.read(whole)
    if read is None:
        read = _from_pieces(whole, dim, index)
    if read is None:
        read = on_the_cpu(op, source, dim, index)
    return read.reshape(()) if source.dim() == 0 else read


def _from_pieces(source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
    """index_select from a source beyond the binding limit: from copies of its pieces, one after the other.

    Reads all of the source, which costs a millisecond or two per GB; the way over the CPU costs a thousand times that.
    """
    length = source.shape[dim]
    limit = open_runtime().binding_limit // 9 * 8  # a buffer may be an eighth larger than its tensor
    step = limit // max(1, source.numel() // length * source.dtype.itemsize)
    size = [index.numel() if d == dim else n for d, n in enumerate(source.shape)]
    if not 0 < step < length or math.prod(size) * source.dtype.itemsize > limit:
        return None
    result = torch.zeros(size, dtype=source.dtype, device=source.device)
    over = [-1 if d == dim else 1 for d in range(source.dim())]
    for start in range(0, length, step):
        piece = source.narrow(dim, start, min(step, length - start)).clone(memory_format=torch.contiguous_format)
        near = index - start
        inside = (near >= 0) & (near < piece.shape[dim])
        found = piece.index_select(dim, near.clamp(0, piece.shape[dim] - 1))
        result = torch.where(inside.view(over), found, result)
    return result


def index_select_out(source: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return into(out, index_select(source, dim, index))


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


KERNELS: dict[str, Callable[..., Any]] = {
    "index.Tensor": index_tensor,
    "index.Tensor_out": index_out,
    "_unsafe_index.Tensor": index_tensor,
    "gather.out": gather_out,
    "embedding": embedding,
    "index_select": index_select,
    "index_select.out": index_select_out,
    "take": take,
    "take.out": take_out,
}


def register(library: torch.library.Library) -> None:
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
