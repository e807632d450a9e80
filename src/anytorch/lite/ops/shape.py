"""Ops that change the shape and not the numbers. Most are views: the result shares the memory of its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, Scatter, array, fit, record
from anytorch.lite.dtypes import Array, promoted
from anytorch.lite.ops.reduce import axes

T = TypeVar("T", bound=Base)


def view(name: str, x: T, data: Array, backward: Any) -> T:
    """A view saves its base's version: writing to the base afterwards changes the view, and its history would be wrong."""
    shares = shares_memory(data, x.data)
    out = record(name, data, (x,), backward, (x,) if shares else ())
    if shares:
        out._version = x._shared_version()
        out._is_view = True
    return out


def shares_memory(data: Array, base: Array) -> bool:
    if data is base:
        return True
    if data.__class__ is np.ndarray:
        if data.base is None:
            return False
        if data.base is base or data.base is base.base:
            return True
    return bool(np.may_share_memory(data, base))


def reshape(x: T, shape: Sequence[int]) -> T:
    before = x.data.shape
    try:
        data = x.data.reshape(tuple(shape))
    except ValueError as exc:
        raise UsageError(f"shape {list(shape)} is invalid for a tensor of shape {before}") from exc
    return view("reshape", x, data, lambda g: (g.reshape(before),))


def permute(x: T, dims: Sequence[int]) -> T:
    order = tuple(d % x.data.ndim for d in dims) if x.data.ndim else ()
    if sorted(order) != list(range(x.data.ndim)):
        raise UsageError(f"permute {list(dims)} does not name each of the {x.data.ndim} dimensions once")
    back = tuple(np.argsort(order)) if order else ()
    return view("permute", x, x.data.transpose(order), lambda g: (g.transpose(back),))


def swap(x: T, a: int, b: int) -> T:
    order = list(range(x.data.ndim))
    if order:
        order[a], order[b] = order[b], order[a]
    return permute(x, order)


def expand(x: T, shape: Sequence[int]) -> T:
    """Repeat without copying; -1 keeps a size."""
    before, dtype = x.data.shape, x.data.dtype
    extra = len(shape) - len(before)
    full = tuple(before[i - extra] if n == -1 and i >= extra else n for i, n in enumerate(shape))
    try:
        data = np.broadcast_to(x.data, full)
    except ValueError as exc:
        raise UsageError(f"a tensor of shape {before} cannot be expanded to {tuple(shape)}") from exc
    return view("expand", x, data, lambda g: (fit(g, before, dtype),))


def squeeze(x: T, dim: int | None = None) -> T:
    shape = x.data.shape
    if dim is None:
        return reshape(x, [n for n in shape if n != 1])
    (dim,) = axes(x.data, dim) or (0,)
    return reshape(x, [n for i, n in enumerate(shape) if i != dim or n != 1])


def unsqueeze(x: T, dim: int) -> T:
    shape = list(x.data.shape)
    if not -len(shape) - 1 <= dim <= len(shape):
        raise UsageError(f"unsqueeze at {dim}: the tensor has {len(shape)} dimensions")
    shape.insert(dim if dim >= 0 else dim + len(shape) + 1, 1)
    return reshape(x, shape)


def flatten(x: T, start: int = 0, end: int = -1) -> T:
    shape = x.data.shape or (1,)
    start, end = start % len(shape), end % len(shape)
    return reshape(x, (*shape[:start], int(np.prod(shape[start : end + 1])), *shape[end + 1 :]))


def plain_index(index: Any) -> Any:
    """Tensors in an index become their arrays."""
    if isinstance(index, Base):
        return index.data
    if isinstance(index, (tuple, list)):
        parts = [plain_index(part) for part in index]
        return tuple(parts) if isinstance(index, tuple) else parts
    return index


def getitem(x: T, index: Any) -> T:
    """`x[index]`: a view for integers and slices, a copy for index tensors and masks."""
    where = plain_index(index)
    try:
        data = x.data[where]
        if isinstance(data, np.generic):  # one number; with an ellipsis NumPy makes it a view, as torch does
            whole = (*where, ...) if isinstance(where, tuple) else (where, ...)
            data = x.data[whole]
    except IndexError as exc:
        raise IndexError(f"{exc} (the tensor has shape {x.data.shape})") from exc
    return view("getitem", x, data, lambda g: (Scatter(where, g),))


def with_item(x: T, index: Any, value: T) -> T:
    """A copy of `x` in which `x[index]` is `value`."""
    where = plain_index(index)
    data = x.data.copy()
    data[where] = value.data
    part = data[where].shape
    shape, dtype = value.data.shape, value.data.dtype

    def backward(g: Array) -> tuple[Array, Array]:
        rest = g.copy()
        rest[where] = 0
        return rest, fit(array(g[where]).reshape(part), shape, dtype)

    return record("setitem", data, (x, value), backward)


def cat(tensors: Sequence[T], dim: int = 0) -> T:
    if not tensors:
        raise UsageError("cat needs at least one tensor")
    # torch lets an empty 1-d tensor stand beside anything, for loops that start with one.
    kept = [t for t in tensors if t.data.shape != (0,)] or list(tensors[:1])
    dtype = kept[0].data.dtype
    for t in kept[1:]:
        dtype = promoted(np.empty(1, dtype), np.empty(1, t.data.dtype))
    (dim,) = axes(kept[0].data, dim)
    try:
        data = np.concatenate([t.data.astype(dtype, copy=False) for t in kept], axis=dim)
    except ValueError as exc:
        raise UsageError(f"cat along {dim}: the shapes {[t.data.shape for t in kept]} do not fit") from exc
    ends = np.cumsum([t.data.shape[dim] for t in kept])[:-1].tolist()
    types = [t.data.dtype for t in kept]

    def backward(g: Array) -> list[Array]:
        return [part.astype(t, copy=False) for part, t in zip(np.split(g, ends, axis=dim), types, strict=True)]

    return record("cat", data, tuple(kept), backward)


def stack(tensors: Sequence[T], dim: int = 0) -> T:
    return cat([unsqueeze(t, dim) for t in tensors], dim)


def split(x: T, size: int, dim: int = 0) -> tuple[T, ...]:
    if size < 1:
        raise UsageError(f"split into parts of {size} is invalid: use 1 or more")
    (dim,) = axes(x.data, dim)
    before = (slice(None),) * dim
    return tuple(getitem(x, (*before, slice(i, i + size))) for i in range(0, max(x.data.shape[dim], 1), size))


def contiguous(x: T) -> T:
    if not isinstance(x.data, np.ndarray) or x.data.flags.c_contiguous:
        return x
    return record("contiguous", np.ascontiguousarray(x.data), (x,), lambda g: (g,))


def clone(x: T) -> T:
    return record("clone", x.data.copy(), (x,), lambda g: (g,))
