"""Reading at places that index tensors name: index, gather, index_select, take.

Every op of indexing, here and in `scattering`, is a `Place`: a walk over some size, which target dimensions it walks, and
which index tensors name the position in the others. Reading there is gather, writing there is scatter, combining there is
scatter_add and similar ops.

An index out of range reads zero and writes nothing, and is reported: IndexError comes where the host next waits for the
device (`gpu.faults`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from anytorch.gpu.buffers import SHIFT, TAG
from anytorch.gpu.launch import Plan
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.faults import site_of
from anytorch.webgpu.indexed import Index, find_plan, gather, positions, scatter
from anytorch.webgpu.kernels import register_kernels, with_out
from anytorch.webgpu.launch import NoKernel, check_devices, let_the_cpu_refuse, made_by, result_of
from anytorch.webgpu.tensors import KEY, NAME, aten, device

INDEX_DTYPES = (torch.int64, torch.int32)
BYTE_MASK = (
    "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."  # torch's own words
)


@dataclass(frozen=True)
class Place:
    size: Sequence[int]  # of the walk
    axes: Sequence[int | None]  # per dimension of the walk: the target's dimension it walks
    indices: Sequence[
        tuple[torch.Tensor, Sequence[int], int]
    ]  # tensor, its strides in the walk, the dimension it indexes
    wrap: bool = False
    site: int = 0  # the op's number, if it reports indices out of range

    def _strides(self, target: torch.Tensor) -> list[int]:
        steps = target.stride()
        return [0 if axis is None else steps[axis] for axis in self.axes]

    def _entries(self, target: torch.Tensor) -> list[Index]:
        return [(index, steps, target.size(dim), target.stride(dim)) for index, steps, dim in self.indices]

    def checked(self, op: Any, target: torch.Tensor) -> Place:
        """This place for an op whose kernel reports indices out of range; where every index is, IndexError at once."""
        for index, _, dim in self.indices:
            if not target.size(dim) and index.numel():
                raise IndexError(f"{op}: every index is out of bounds for dimension {dim} with size 0")
        site = site_of(op, [dim for _, _, dim in self.indices], buffers=2 + len(self.indices))
        return replace(self, site=site) if site else self

    def read(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """The elements there, in a new tensor or in `into` if that can be written as a whole."""
        strides, entries = self._strides(source), self._entries(source)
        return gather(source, self.size, strides, entries, wrap=self.wrap, into=into, site=self.site)

    def plan(self, source: torch.Tensor, size: Sequence[int]) -> Plan:
        """The plan by which `read` makes a new tensor, for a result of this size and as many elements."""
        strides, entries = self._strides(source), self._entries(source)
        at = source.data_ptr()
        plan = copy(find_plan("", source.dtype, self.size, (strides,), entries, at, self.wrap, self.site))
        plan.result = result_of(size, source.dtype)
        return plan

    def write(self, target: torch.Tensor, source: torch.Tensor, mode: str = "set") -> None:
        """`source` is broadcast to the walk."""
        if 0 in self.size or target.numel() == 0:
            return
        steps = source.expand(self.size).stride()
        scatter(
            *(target, self._strides(target), source, steps, self.size, self._entries(target)),
            mode=mode,
            wrap=self.wrap,
            site=self.site,
        )

    def combine(self, target: torch.Tensor, source: torch.Tensor, mode: str) -> None:
        """Like `write`, for every dtype that is `combinable`, beside if need be."""
        if not combinable(target.dtype, mode):
            raise NoKernel
        if 0 in self.size or target.numel() == 0:
            return
        if target.dtype in (torch.float32, torch.int32, torch.int64):
            self.write(target, source.to(target.dtype), mode)
            return
        wide = torch.float32 if target.is_floating_point() else torch.int32
        beside = target.to(wide, memory_format=torch.contiguous_format)
        self.write(beside, source.to(wide), mode)
        target.copy_(beside)


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


def ours(op: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A CPU scalar comes along; any other tensor of another device is an error."""
    check_devices(op, tensor)
    return tensor if tensor.device.type == NAME else tensor.to(device())


def check_index(op: Any, index: torch.Tensor) -> None:
    """NoKernel unless our kernels can read this index. On another device it is the user's error."""
    check_devices(op, index)
    if index.device.type != NAME or index.dtype not in INDEX_DTYPES:
        raise NoKernel


def combinable(dtype: torch.dtype, mode: str) -> bool:
    if dtype is torch.int64:
        return mode in ("sum", "mean", "set")
    narrow = (torch.bool, torch.int8, torch.uint8, torch.int16)
    return dtype in (torch.float32, torch.int32, torch.float16, torch.bfloat16, *narrow)


def constant(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:  # no shader writes one
        return torch.tensor(value, dtype=dtype).to(device())
    return torch.full((), value, dtype=dtype, device=device())


def counted(places: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of `size` places is named, as int32; one out of range counts nowhere."""
    counts = torch.zeros(size, dtype=torch.int32, device=device())
    selecting(counts, 0, places).write(counts, constant(1, torch.int32), "sum")
    return counts


def total(shape: tuple[int, ...], places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sums of `values` by place, in single precision for the half types."""
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    result = torch.zeros(shape, dtype=wide, device=device())
    selecting(result, 0, places).combine(result, values, "sum")
    return result


# --- index and index_put -----------------------------------------------------------------------------------------


def advanced(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Place:
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
            if index.dtype is torch.uint8:
                warnings.warn(BYTE_MASK, stacklevel=2)
            chosen = positions(index if index.dtype is torch.bool else index.ne(0))
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
    return advanced(ours(op, target), indices).checked(op, target).read(target)


def unsafe_index(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """As `index_tensor`, for torch's own decompositions, whose indices need no check."""
    return advanced(ours(aten._unsafe_index.Tensor, target), indices).read(target)


# --- one dimension -----------------------------------------------------------------------------------------------


def gather_out(
    source: torch.Tensor, dim: int, index: torch.Tensor, sparse_grad: bool = False, *, out: torch.Tensor
) -> torch.Tensor:
    op = aten.gather.out
    if out.numel() == 0:
        return out
    whole, dim = on_dimension(ours(op, source), dim)
    check_index(op, index)
    place = along(dim, index.unsqueeze(0) if index.dim() == 0 else index).checked(op, whole)
    shares = index.data_ptr() >> SHIFT == out.data_ptr() >> SHIFT
    read = place.read(whole, None if shares or out.dtype is not source.dtype else out)
    return out if read is out else out.copy_(read.reshape(index.shape))


def _selected(name: str, source: torch.Tensor, dim: int, index: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    """The key of this geometry, and the result if it has been seen before."""
    low, at = source.data_ptr(), index.data_ptr()
    key = (
        *(name, source.dtype, source.size(), source.stride(), low & 15, dim),
        *(index.dtype, index.size(), index.stride()),
    )
    plan = plans[key]
    if plan is None or not low & at & TAG:
        return key, None
    try:
        return key, made_by(plan, (low, at))
    except BindingTooLarge:
        return key, None


def embedding(weight: torch.Tensor, indices: torch.Tensor, *of_gradient: Any) -> torch.Tensor:
    """torch makes it of reshape, index_select and view; here it is the launch of the second alone."""
    key, found = _selected("embedding", weight, 0, indices)
    if found is not None:
        return found
    if weight.dim() != 2:
        raise RuntimeError("'weight' must be 2-D")
    if indices.dtype not in INDEX_DTYPES:  # torch says so before it looks where they are
        let_the_cpu_refuse(aten.embedding.default, (weight, indices), {})
    flat = indices.reshape(-1)
    size = (*indices.shape, weight.shape[1])
    plain = indices.is_contiguous() and indices.dtype in INDEX_DTYPES and weight.numel() and indices.numel()
    if plain and indices.device.type == weight.device.type == NAME:
        plans[key] = selecting(weight, 0, flat).checked(aten.embedding.default, weight).plan(weight, size)
    return _select(aten.embedding.default, weight, 0, flat).view(size)


def index_select(source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    key, found = _selected("index_select", source, dim, index)
    return _select(aten.index_select.default, source, dim, index, key) if found is None else found


def _select(op: Any, source: torch.Tensor, dim: int, index: torch.Tensor, key: Any = None) -> torch.Tensor:
    """index_select; its plan is kept for `key`."""
    whole, dim = on_dimension(ours(op, source), dim)
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if index.dtype not in INDEX_DTYPES:
        raise RuntimeError("index_select(): Expected dtype int32 or int64 for index")
    index = ours(op, index)
    place = selecting(whole, dim, index).checked(op, whole)
    if key is not None and index.dim() == 1 and whole is source and 0 not in place.size:
        plans[key] = place.plan(source, place.size)
    try:
        read = place.read(whole)
    except BindingTooLarge:
        pieced = _from_pieces(place, whole, dim, index)
        read = fallback(op, source, dim, index) if pieced is None else pieced
    return read.reshape(()) if source.dim() == 0 else read


def _from_pieces(place: Place, source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
    """index_select from a source beyond the binding limit: from copies of its pieces, one after the other.

    Reads all of the source, which costs a millisecond or two per GB; the way over the CPU costs a thousand times that.
    """
    length = source.shape[dim]
    limit = open_runtime().binding_limit // 9 * 8  # a buffer may be an eighth larger than its tensor
    step = limit // max(1, source.numel() // length * source.dtype.itemsize)
    size = [index.numel() if d == dim else n for d, n in enumerate(source.shape)]
    if not 0 < step < length or math.prod(size) * source.dtype.itemsize > limit:
        return None
    # The pieces are asked for what they have, so somebody must tell of an index that none of them has: a read of one element
    # that stands for all of the dimension.
    gather(constant(0, torch.int32), (index.numel(),), (0,), [(index, index.stride(), length, 0)], site=place.site)
    result = torch.zeros(size, dtype=source.dtype, device=source.device)
    over = [-1 if d == dim else 1 for d in range(source.dim())]
    for start in range(0, length, step):
        piece = source.narrow(dim, start, min(step, length - start)).clone(memory_format=torch.contiguous_format)
        near = index - start
        inside = (near >= 0) & (near < piece.shape[dim])
        found = piece.index_select(dim, near.clamp(0, piece.shape[dim] - 1))
        result = torch.where(inside.view(over), found, result)
    return result


# --- flat ----------------------------------------------------------------------------------------------------------


def flat_place(index: torch.Tensor) -> Place:
    return Place(index.size(), [None] * index.dim(), [(index, index.stride(), 0)], wrap=True)


def take(source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    op = aten.take.default
    check_index(op, index)
    if source.numel() == 0 and index.numel():
        raise IndexError("take(): tried to take from an empty tensor")
    flat = ours(op, source).reshape(-1)
    return flat_place(index).checked(op, flat).read(flat)


KERNELS: dict[str, Callable[..., Any]] = {
    "index.Tensor": index_tensor,
    "_unsafe_index.Tensor": unsafe_index,
    "gather.out": gather_out,
    "index_select.out": with_out(index_select, ["out"]),
    "take": take,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
    library.impl("embedding", embedding, KEY)
    library.impl("index_select", index_select, KEY)
