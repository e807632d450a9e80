"""Ops that make one number of many."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, array, make, record
from anytorch.lite.dtypes import Array, int64, is_floating

T = TypeVar("T", bound=Base)
Dim = int | Sequence[int] | None


def axes(x: Array, dim: Dim) -> tuple[int, ...]:
    """The axes meant by `dim`, counted from 0; None or () means all."""
    if dim is None:
        return tuple(range(x.ndim))
    named = (dim,) if isinstance(dim, int) else tuple(dim)
    if not named:
        return tuple(range(x.ndim))
    least = max(x.ndim, 1)
    for d in named:
        if not -least <= d < least:
            raise UsageError(f"dimension {d} does not exist: the tensor has {x.ndim} dimensions")
    return tuple(d % least for d in named) if x.ndim else ()


def spread(g: Array, shape: tuple[int, ...], over: tuple[int, ...]) -> Array:
    """Undo a reduction: give every number that went in the gradient of what came out."""
    kept = tuple(1 if i in over else n for i, n in enumerate(shape))
    return np.broadcast_to(g.reshape(kept), shape)


def sum_of(x: T, dim: Dim = None, keepdim: bool = False) -> T:
    over, shape = axes(x.data, dim), x.data.shape
    dtype = x.data.dtype if is_floating(x.data.dtype) else int64
    result = x.data.sum(axis=over, keepdims=keepdim, dtype=dtype)
    return record("sum", result, (x,), lambda g: (spread(g, shape, over),))


def mean(x: T, dim: Dim = None, keepdim: bool = False) -> T:
    if not is_floating(x.data.dtype):
        raise UsageError(f"mean of a {x.data.dtype} tensor is not supported", hint="convert it first: x.float().mean()")
    over, shape = axes(x.data, dim), x.data.shape
    n = prod(shape[i] for i in over)
    with np.errstate(all="ignore"):  # the mean of nothing is nan
        result = x.data.sum(axis=over, keepdims=keepdim) / x.data.dtype.type(n)
    return record("mean", result, (x,), lambda g: (spread(g / max(n, 1), shape, over),))


def var(x: T, dim: Dim = None, keepdim: bool = False, correction: int = 1) -> T:
    """Σ(x − mean)² / (n − correction)"""
    over, shape = axes(x.data, dim), x.data.shape
    n = prod(shape[i] for i in over)
    centred = x.data - np.sum(x.data, axis=over, keepdims=True) / max(n, 1)
    with np.errstate(all="ignore"):
        divisor = x.data.dtype.type(max(n - correction, 0))
        result = np.sum(centred * centred, axis=over, keepdims=keepdim) / divisor
        scale = 2 / divisor

    def backward(g: Array) -> tuple[Array]:
        with np.errstate(all="ignore"):
            return (spread(g * scale, shape, over) * centred,)

    return record("var", result, (x,), backward, (x,))


def extreme(x: T, dim: Dim, keepdim: bool, name: str) -> T:
    """amax and amin: equal winners share the gradient."""
    over, shape = axes(x.data, dim), x.data.shape
    if prod(shape[i] for i in over) == 0 and over:
        raise UsageError(f"{name} of an empty tensor is undefined; its shape is {shape}")
    result = array((np.max if name == "amax" else np.min)(x.data, axis=over, keepdims=keepdim))

    def backward(g: Array) -> tuple[Array]:
        won = (x.data == spread(result, shape, over)).astype(g.dtype)
        return (spread(g, shape, over) * won / np.sum(won, axis=over, keepdims=True),)

    return record(name, result, (x,), backward, (x,))


def arg_extreme(x: T, dim: int | None, keepdim: bool, largest: bool) -> T:
    """Where the extreme number is; the first one if several are equal. No gradient."""
    if x.data.size == 0:
        raise UsageError(f"argmax or argmin of an empty tensor is undefined; its shape is {x.data.shape}")
    find = np.argmax if largest else np.argmin
    out: T = make(x, array(find(x.data, axis=dim, keepdims=keepdim and dim is not None)).astype(int64))
    return out


def extreme_along(x: T, dim: int, keepdim: bool, largest: bool) -> tuple[T, T]:
    """The extreme numbers along one dimension and where they are; the gradient goes to that place alone."""
    (dim,) = axes(x.data, dim) or (0,)
    indices = arg_extreme(x, dim, True, largest)
    shape, places = x.data.shape, indices.data
    result = array((np.max if largest else np.min)(x.data, axis=dim, keepdims=keepdim))

    def backward(g: Array) -> tuple[Array]:
        along = [1] * len(shape)
        along[dim] = shape[dim]
        won = np.arange(shape[dim]).reshape(along) == places
        return (np.where(won, g.reshape(places.shape), g.dtype.type(0)),)

    if not keepdim:
        indices = make(x, np.squeeze(places, dim))
    return record("max" if largest else "min", result, (x,), backward), indices


def cumsum(x: T, dim: int) -> T:
    return record(
        "cumsum",
        np.cumsum(x.data, dim, dtype=x.data.dtype if is_floating(x.data.dtype) else int64),
        (x,),
        lambda g: (np.flip(np.cumsum(np.flip(g, dim), dim, dtype=g.dtype), dim),),
    )


def truth(x: T, dim: int | None, compute: Any) -> T:
    """`any` and `all`."""
    out: T = make(x, array(compute(x.data, axis=dim)))
    return out
