"""What arrays on the GPU answer to NumPy's functions that are not ufuncs: sums, shapes, joining, choosing."""

from __future__ import annotations

from typing import Any

import numpy as np

from anytorch.lite.dtypes import boolean, float32
from anytorch.lite.gpu import folds, kernels
from anytorch.lite.gpu.array import FUNCTIONS, GpuArray, as_gpu, compute, place_of_extreme
from anytorch.lite.gpu.kernels import new


def _reduction(name: str) -> Any:
    def run(x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None, **others: Any) -> Any:
        wanted = float32 if dtype is None else np.dtype(dtype)
        if others or not isinstance(x, GpuArray) or wanted.kind != "f" or (x.dtype == boolean and dtype is None):
            return NotImplemented
        result = getattr(x, name)(axis, keepdims)
        return result if wanted == float32 else result.astype(wanted)

    return run


def _place(name: str) -> Any:
    return lambda x, axis=None, keepdims=False: place_of_extreme(name, x, axis, keepdims)


def _full(value: float) -> Any:
    def run(x: GpuArray, dtype: Any = None, shape: Any = None, **others: Any) -> Any:
        if others or (dtype is not None and np.dtype(dtype) != float32):
            return NotImplemented
        wanted = x.shape if shape is None else tuple(shape)
        return GpuArray(kernels.elementwise("x0", [value], wanted))

    return run


def _swapaxes(x: GpuArray, a: int, b: int) -> GpuArray:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return x.transpose(order)


def _expand_dims(x: GpuArray, axis: int) -> GpuArray:
    shape = list(x.shape)
    shape.insert(axis if axis >= 0 else axis + x.ndim + 1, 1)
    return x.reshape(tuple(shape))


def _moveaxis(x: GpuArray, source: int, target: int) -> GpuArray:
    order = [d for d in range(x.ndim) if d != source % x.ndim]
    order.insert(target % x.ndim, source % x.ndim)
    return x.transpose(order)


def _concatenate(arrays: Any, axis: int = 0) -> Any:
    if not all(isinstance(a, GpuArray) for a in arrays):
        return NotImplemented
    axis %= arrays[0].ndim
    shape = list(arrays[0].shape)
    shape[axis] = sum(a.shape[axis] for a in arrays)
    out, at = GpuArray(new(tuple(shape))), 0
    for a in arrays:
        place = (*(slice(None),) * axis, slice(at, at + a.shape[axis]))
        out[place] = a
        at += a.shape[axis]
    return out


def _split(x: GpuArray, ends: Any, axis: int = 0) -> Any:
    before = (slice(None),) * (axis % x.ndim)
    places = [(*before, slice(a, b)) for a, b in zip([0, *ends], [*ends, x.shape[axis]], strict=True)]
    return [x[place] for place in places]


def _may_share_memory(a: Any, b: Any) -> bool:
    return isinstance(a, GpuArray) and isinstance(b, GpuArray) and a.layout.memory is b.layout.memory


def _where(condition: Any, x: Any, y: Any) -> Any:
    others = [each for each in (x, y) if isinstance(each, (GpuArray, np.ndarray)) and each.ndim]
    if any(each.dtype != float32 for each in others):
        return NotImplemented
    mask = condition if isinstance(condition, GpuArray) else as_gpu(condition)
    return compute("select(x2, x1, x0 != 0.0)", (mask, x, y))


def _clip(x: GpuArray, low: float | None, high: float | None) -> GpuArray:
    if low is None or high is None:
        return compute(
            "minimum_f32(x0, x1)" if low is None else "maximum_f32(x0, x1)", (x, high if low is None else low)
        )
    return compute("minimum_f32(maximum_f32(x0, x1), x2)", (x, low, high))


def _cumsum(x: GpuArray, axis: int, dtype: Any = None) -> Any:
    if x.dtype != float32 or not x.ndim:
        return NotImplemented
    return GpuArray(folds.running("cumsum", x.dense().layout, axis % x.ndim))


def _flip(x: GpuArray, axis: int) -> Any:
    place = (slice(None),) * (axis % x.ndim) + (slice(None, None, -1),)
    return x[place]


FUNCTIONS |= {
    np.sum: _reduction("sum"),
    np.max: _reduction("max"),
    np.min: _reduction("min"),
    np.mean: _reduction("mean"),
    np.argmax: _place("amax"),
    np.argmin: _place("amin"),
    np.cumsum: _cumsum,
    np.where: _where,
    np.clip: _clip,
    np.flip: _flip,
    np.zeros_like: _full(0.0),
    np.ones_like: _full(1.0),
    np.broadcast_to: lambda x, shape: x.broadcast((shape,) if isinstance(shape, int) else tuple(shape)),
    np.swapaxes: _swapaxes,
    np.expand_dims: _expand_dims,
    np.moveaxis: _moveaxis,
    np.concatenate: _concatenate,
    np.split: _split,
    np.may_share_memory: _may_share_memory,
    np.ndim: lambda x: x.ndim,
    np.shape: lambda x: x.shape,
}
