"""An array on the GPU that answers to NumPy's functions.

NumPy asks an operand's class before it computes (`__array_ufunc__`, `__array_function__`), so the ops of this library, being
written with NumPy's functions, need no second version: what has a kernel runs on the GPU, and what has none is brought to
the host, computed there and brought back. `fallbacks` counts the latter by name.

float32 lives on the GPU, and so do the masks that comparisons give. Whole numbers (class numbers, indices) stay on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from anytorch.errors import UsageError
from anytorch.gpu.wgsl.types import dense_strides
from anytorch.lite.dtypes import Array, DType, boolean, float32
from anytorch.lite.gpu import folds, kernels
from anytorch.lite.gpu.kernels import Layout, read, write

fallbacks: Counter[str] = Counter()

# NumPy's ufuncs in WGSL. A name ending in _f32 is a function of `gpu.wgsl.functions`, exact where WGSL is not.
EXPRESSIONS: dict[Any, str] = {
    np.add: "x0 + x1",
    np.subtract: "x0 - x1",
    np.multiply: "x0 * x1",
    np.true_divide: "divide_f32(x0, x1)",
    np.power: "pow_f32(x0, x1)",
    np.maximum: "maximum_f32(x0, x1)",
    np.minimum: "minimum_f32(x0, x1)",
    np.negative: "-x0",
    np.absolute: "abs(x0)",
    np.sign: "sign(x0)",
    np.exp: "exp_f32(x0)",
    np.log: "log_f32(x0)",
    np.log1p: "log1p_f32(x0)",
    np.sqrt: "sqrt(x0)",
    np.rint: "round(x0)",  # to the even one of two, as NumPy does
    np.sin: "sin_f32(x0)",
    np.cos: "cos_f32(x0)",
    np.tanh: "tanh_f32(x0)",
    np.logaddexp: "logaddexp_f32(x0, x1)",
}
# What gives a mask: 0.0 or 1.0. Whether `x == x` holds for a NaN is not left to the compiler.
COMPARISONS: dict[Any, str] = {
    np.equal: "select(0.0, 1.0, equal_f32(x0, x1))",
    np.not_equal: "select(1.0, 0.0, equal_f32(x0, x1))",
    np.less: "select(0.0, 1.0, x0 < x1)",
    np.less_equal: "select(0.0, 1.0, x0 < x1 || equal_f32(x0, x1))",
    np.greater: "select(0.0, 1.0, x0 > x1)",
    np.greater_equal: "select(0.0, 1.0, x0 > x1 || equal_f32(x0, x1))",
}
OF_MASKS: dict[Any, str] = {np.bitwise_and: "x0 * x1", np.bitwise_or: "max(x0, x1)", np.invert: "1.0 - x0"}

# NumPy's functions that are not ufuncs: `answers` fills it in.
FUNCTIONS: dict[Any, Any] = {}


def upload(host: Array) -> Array:
    """`host` on the GPU if it is float32; as it is otherwise."""
    if isinstance(host, GpuArray):
        return host
    host = np.asarray(host)
    return GpuArray(write(host)) if host.dtype == float32 else host


def folding(name: str) -> Callable[..., GpuArray]:
    return lambda self, axis=None, keepdims=False: reduced(name, self, axis, keepdims)


class GpuArray(NDArrayOperatorsMixin):
    """float32 numbers on the GPU, or a mask. Transposing, broadcasting and slicing give views, as in NumPy."""

    __slots__ = ("dtype", "layout")
    itemsize = 4

    def __init__(self, layout: Layout, dtype: DType = float32) -> None:
        self.layout = layout
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def nbytes(self) -> int:
        return 4 * self.layout.size

    @property
    def T(self) -> GpuArray:
        return self.transpose()

    def __len__(self) -> int:
        return self.layout.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host = read(self.dense().layout).astype(self.dtype, copy=False)
        return host if dtype is None else host.astype(dtype, copy=False)

    def item(self) -> float | bool:
        value: float | bool = self.__array__().item()
        return value

    def __bool__(self) -> bool:
        return bool(self.__array__())

    def __float__(self) -> float:
        return float(self.__array__())

    def tolist(self) -> Any:
        return self.__array__().tolist()

    def __repr__(self) -> str:
        return f"GpuArray({self.__array__()})"

    # --- NumPy's two questions ---------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        check_devices(ufunc.__name__, inputs)
        if method == "at":  # np.add.at(x, index, values) writes to x
            return add_at(ufunc, *inputs)
        masks = self.dtype == boolean and all(getattr(x, "dtype", None) == boolean for x in inputs)
        target = None if out is None else out[0]
        if method != "__call__" or options:
            result = on_host(ufunc.__name__, getattr(ufunc, method), inputs, options)
        elif ufunc in EXPRESSIONS and not masks:
            if type(target) is GpuArray and target.dtype is float32:
                compute(EXPRESSIONS[ufunc], inputs, out=target.layout)
                return target
            result = compute(EXPRESSIONS[ufunc], inputs)
        elif ufunc is np.matmul and not masks:
            result = matmul(*(as_gpu(x) for x in inputs))
        elif ufunc in COMPARISONS or (ufunc in OF_MASKS and masks):
            result = compute(COMPARISONS.get(ufunc) or OF_MASKS[ufunc], inputs, boolean)
        else:
            result = on_host(ufunc.__name__, ufunc, inputs, options)
        if target is None:
            return result
        target[...] = result
        return target

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known = FUNCTIONS.get(function)
        if known is not None:
            result = known(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return on_host(function.__name__, function, args, kwargs)

    # --- shape -------------------------------------------------------------------------------------------------------

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None) -> GpuArray:
        at = self.layout.offset if offset is None else offset
        return GpuArray(Layout(self.layout.memory, shape, strides, at), self.dtype)

    def dense(self) -> GpuArray:
        return self if self.layout.dense else self.copy()

    def copy(self) -> GpuArray:
        return GpuArray(kernels.copied(self.layout), self.dtype)

    def astype(self, dtype: Any, copy: bool = True) -> Array:
        if np.dtype(dtype) == self.dtype:
            return self.copy() if copy else self
        if np.dtype(dtype) == float32:  # a mask, whose numbers are 0.0 and 1.0 already
            return GpuArray(kernels.copied(self.layout))
        return self.__array__().astype(dtype)

    def reshape(self, *shape: Any) -> GpuArray:
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        full = whole_shape(self.size, tuple(wanted))
        return self.dense().view(full, dense_strides(full))

    def transpose(self, *order: Any) -> GpuArray:
        axes = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
        axes = tuple(axes) or tuple(range(self.ndim))[::-1]
        layout = self.layout
        return self.view(tuple(layout.shape[i] for i in axes), tuple(layout.strides[i] for i in axes))

    def broadcast(self, shape: tuple[int, ...]) -> GpuArray:
        return self.view(tuple(shape), kernels.broadcast_strides(self.layout, shape))

    def part(self, index: Any) -> GpuArray | None:
        """The view that integers, slices, None and an ellipsis name; None if the index is of another kind.

        Slices that run backwards have negative strides, which only `copied` takes.
        """
        parts = list(index) if isinstance(index, tuple) else [index]
        if not all(is_basic(p) for p in parts):
            return None
        named = sum(p is not None and p is not Ellipsis for p in parts)
        if Ellipsis not in parts:
            parts.append(Ellipsis)
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (self.ndim - named)
        shape, strides, offset, dim = [], [], self.layout.offset, 0
        for p in parts:
            if p is None:
                shape.append(1)
                strides.append(0)
                continue
            if dim >= self.ndim:
                raise IndexError(f"too many indices for an array with {self.ndim} dimensions")
            n, step = self.shape[dim], self.layout.strides[dim]
            dim += 1
            if isinstance(p, int):
                if not -n <= p < n:
                    raise IndexError(f"index {p} is out of bounds for axis {dim - 1} with size {n}")
                offset += (p % n) * step
                continue
            begin, end, by = p.indices(n)
            shape.append(len(range(begin, end, by)))
            strides.append(step * by)
            offset += begin * step if shape[-1] else 0
        return self.view(tuple(shape), tuple(strides), offset)

    def __getitem__(self, index: Any) -> Any:
        found = self.part(index)
        if found is not None:
            return found if min(found.layout.strides, default=0) >= 0 else found.copy()
        rows = row_numbers(index, self)
        if rows is not None:
            return GpuArray(kernels.take_rows(self.dense().layout, rows), self.dtype)
        return on_host("getitem", lambda x: x[to_host(index)], (self,), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self.part(index)
        if target is None:
            host = self.__array__()
            host[to_host(index)] = np.asarray(value)
            fallbacks["setitem"] += 1
            target, value = self, GpuArray(write(host))
        if isinstance(value, (int, float)):
            kernels.elementwise("x0", [float(value)], out=target.layout)
            return
        source = as_gpu(value)
        if source.layout.memory is target.layout.memory:
            source = source.copy()
        kernels.copied(source.broadcast(target.shape).layout, target.layout)

    # --- methods that ndarray has as well ----------------------------------------------------------------------------

    def dot(self, other: Array) -> GpuArray:
        check_devices("dot", (self, other))
        return matmul(self, as_gpu(other))

    def sum(self, axis: Any = None, keepdims: bool = False, dtype: Any = float32) -> Array:
        if self.dtype == boolean and np.dtype(dtype).kind != "f":  # counting: exact, and whole numbers live on the host
            return on_host("sum", np.sum, (self, axis), {"keepdims": keepdims, "dtype": dtype})
        return reduced("sum", self, axis, keepdims)

    max = folding("amax")
    min = folding("amin")
    mean = folding("mean")
    var = folding("var")


def is_basic(part: Any) -> bool:
    if part is None or part is Ellipsis:
        return True
    return isinstance(part, (int, slice)) and not isinstance(part, bool)


def whole_shape(size: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted` with its -1 worked out."""
    rest = prod(n for n in wanted if n != -1)
    full = tuple((size // rest if rest else 0) if n == -1 else n for n in wanted)
    if prod(full) != size:
        raise ValueError(f"{size} numbers do not have the shape {wanted}")
    return full


def as_gpu(value: Any) -> GpuArray:
    return value if isinstance(value, GpuArray) else GpuArray(write(np.asarray(value, np.float32)))


def check_devices(name: str, inputs: Any) -> None:
    for x in inputs:
        if isinstance(x, np.ndarray) and x.ndim and x.dtype.kind == "f":
            raise UsageError(
                f"{name}: one tensor is on the GPU, another in the host's memory", hint="move one with .to(device)"
            )


def row_numbers(index: Any, x: GpuArray) -> Array | None:
    """The index as numbers of rows, each from 0 to n − 1, if that is what it is."""
    alone = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not isinstance(alone, (list, np.ndarray)) or not x.ndim:
        return None
    numbers = np.asarray(alone)
    if numbers.dtype.kind not in "iu":
        return None
    n = x.shape[0]
    if numbers.size and not (-n <= numbers.min() and numbers.max() < n):
        raise IndexError(f"row numbers {numbers.min()} to {numbers.max()} are out of range: the array has {n} rows")
    return np.where(numbers < 0, numbers + n, numbers)


def add_at(ufunc: Any, target: GpuArray, index: Any, values: Any) -> None:
    """np.add.at: an index may name one place twice."""
    rows = row_numbers(index, target) if ufunc is np.add and target.layout.dense else None
    if rows is not None:
        shape = (*rows.shape, *target.shape[1:])
        kernels.add_rows(target.layout, rows, as_gpu(values).broadcast(shape).dense().layout)
        return
    host = target.__array__()
    ufunc.at(host, to_host(index), to_host(values))
    target[...] = GpuArray(write(host))
    fallbacks[f"{ufunc.__name__}.at"] += 1


def compute(expression: str, inputs: Any, dtype: DType = float32, out: Layout | None = None) -> GpuArray:
    """An elementwise expression of x0, x1, …; numbers (and arrays of one) become parameters, masks are uploaded."""
    operands = [x.layout if type(x) is GpuArray else as_gpu(x).layout if np.ndim(x) else float(x) for x in inputs]
    return GpuArray(kernels.elementwise(expression, operands, out=out), dtype)


def axes_of(x: GpuArray, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    named = (axis,) if isinstance(axis, int) else tuple(axis)
    return tuple(d % x.ndim for d in named) if x.ndim else ()


def without(shape: tuple[int, ...], over: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    """The shape that folding the axes `over` leaves."""
    return tuple(1 if d in over else n for d, n in enumerate(shape) if keepdims or d not in over)


def reduced(name: str, x: GpuArray, axis: Any = None, keepdims: bool = False) -> GpuArray:
    over = axes_of(x, axis)
    if name in ("amax", "amin") and not all(x.shape[d] for d in over):
        raise ValueError(f"{name} of an empty array is undefined")
    (out,) = folds.folded(name, x.layout, over)
    return GpuArray(folds.as_shape(out, without(x.shape, over, keepdims)))


def place_of_extreme(name: str, x: GpuArray, axis: int | None, keepdims: bool) -> Array:
    """argmax and argmin: whole numbers, so on the host."""
    over = axes_of(x, axis)
    _, places = folds.folded(name, x.layout, over, places=True)
    return read(folds.as_shape(places, without(x.shape, over, keepdims)), np.int32).astype(np.int64)


def matmul(a: GpuArray, b: GpuArray) -> GpuArray:
    """NumPy's rules: vectors, matrices, and batches that broadcast."""
    left = a if a.ndim > 1 else a.reshape(1, -1)
    right = b if b.ndim > 1 else b.reshape(-1, 1)
    (m, k), n = left.shape[-2:], right.shape[-1]
    if k != right.shape[-2]:
        raise ValueError(f"shapes {a.shape} and {b.shape} do not match")
    batch = () if left.ndim == right.ndim == 2 else np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    count = prod(batch)
    shape = (*batch, *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ()))
    if not (count and m and n and k):
        return as_gpu(np.zeros(shape, np.float32))
    x, y = (each if each.ndim == 2 else as_batch(each, batch, count) for each in (left, right))
    return GpuArray(folds.product(x.layout, y.layout, shape, count, m, n, k))


def as_batch(x: GpuArray, batch: tuple[int, ...], count: int) -> GpuArray:
    """(…, r, c) → (count, r, c) as a view where the leading dimensions are one step apart, else as a copy."""
    if x.shape[:-2] == batch and len(batch) == 1:
        return x
    whole = x.broadcast((*batch, *x.shape[-2:])).dense()
    return whole.reshape(count, *x.shape[-2:])


def on_host(name: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Bring the operands to the host, compute there, bring float32 results back."""
    fallbacks[name] += 1
    return back(function(*(to_host(a) for a in args), **{key: to_host(value) for key, value in kwargs.items()}))


def to_host(value: Any) -> Any:
    if isinstance(value, GpuArray):
        return value.__array__()
    if isinstance(value, (list, tuple)):
        return type(value)(to_host(each) for each in value)
    return value


def back(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return upload(np.asarray(value))
    if isinstance(value, (list, tuple)):
        return type(value)(back(each) for each in value)
    return value
