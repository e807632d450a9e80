"""An array on the GPU that answers to NumPy's functions.

NumPy asks an operand's class before it computes (`__array_ufunc__`, `__array_function__`), so the ops of this library, being
written with NumPy's functions, need no second version: what has a kernel runs on the GPU, and what has none is brought to
the host, computed there and brought back. `fallbacks` counts the latter by name.

float32 lives on the GPU; whole numbers and booleans (class numbers, masks) stay on the host, where they are indices.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from anytorch.errors import DeviceUnavailable, UsageError
from anytorch.lite.dtypes import Array, float32

try:
    from anytorch.lite.gpu import kernels
    from anytorch.lite.gpu.memory import Layout, dense_strides, new, read, write
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] != "wgpu":
        raise
    raise DeviceUnavailable(
        "tensors on the GPU need the package wgpu, which is not installed", hint="pip install 'anytorch[webgpu]'"
    ) from exc

fallbacks: Counter[str] = Counter()

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
    np.sin: "sin_f32(x0)",
    np.cos: "cos_f32(x0)",
    np.tanh: "tanh_f32(x0)",
}


def upload(host: Array) -> Array:
    """`host` on the GPU if it is float32; as it is otherwise."""
    if isinstance(host, GpuArray):
        return host
    host = np.asarray(host)
    return GpuArray(write(host)) if host.dtype == float32 else host


class GpuArray(NDArrayOperatorsMixin):
    """float32 numbers on the GPU. Transposing, broadcasting and slicing give views, as in NumPy."""

    __slots__ = ("layout",)
    dtype = float32
    itemsize = 4

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

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
        host = read(self.dense().layout)
        return host if dtype is None else host.astype(dtype, copy=False)

    def item(self) -> float:
        return float(self.__array__().item())

    def tolist(self) -> Any:
        return self.__array__().tolist()

    def __repr__(self) -> str:
        return f"GpuArray({self.__array__()})"

    # --- NumPy's two questions ---------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        check_devices(ufunc.__name__, inputs)
        if method == "__call__" and not options and ufunc is np.matmul:
            result: Any = matmul(*(as_gpu(x) for x in inputs))
        elif method == "at":  # np.add.at(x, index, values) writes to x
            host = inputs[0].__array__()
            ufunc.at(host, *(to_host(x) for x in inputs[1:]))
            inputs[0][...] = GpuArray(write(host))
            fallbacks[f"{ufunc.__name__}.at"] += 1
            return None
        elif method == "__call__" and not options and ufunc in EXPRESSIONS:
            result = compute(EXPRESSIONS[ufunc], inputs)
        else:
            result = on_host(ufunc.__name__, getattr(ufunc, method), inputs, options)
        if out is None:
            return result
        (target,) = out
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
        return GpuArray(Layout(self.layout.memory, shape, strides, at))

    def dense(self) -> GpuArray:
        return self if self.layout.dense else self.copy()

    def copy(self) -> GpuArray:
        return GpuArray(kernels.copied(self.layout))

    def astype(self, dtype: Any, copy: bool = True) -> Array:
        if np.dtype(dtype) == float32:
            return self.copy() if copy else self
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
        if np.broadcast_shapes(self.shape, shape) != tuple(shape):
            raise ValueError(f"{self.shape} cannot be broadcast to {shape}")
        extra = len(shape) - self.ndim
        strides = tuple(
            0 if i < extra or self.shape[i - extra] == 1 else self.layout.strides[i - extra] for i in range(len(shape))
        )
        return self.view(tuple(shape), strides)

    def part(self, index: Any) -> GpuArray | None:
        """The view that integers, slices, None and an ellipsis name; None if the index is of another kind."""
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
            if by < 0:
                return None
            shape.append(len(range(begin, end, by)))
            strides.append(step * by)
            offset += begin * step if shape[-1] else 0
        return self.view(tuple(shape), tuple(strides), offset)

    def __getitem__(self, index: Any) -> Any:
        found = self.part(index)
        return found if found is not None else on_host("getitem", lambda x: x[index], (self,), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self.part(index)
        if target is None:
            host = self.__array__()
            host[index] = np.asarray(value)
            fallbacks["setitem"] += 1
            target, value = self, GpuArray(write(host))
        if isinstance(value, (int, float)):
            kernels.elementwise("s0()", [], [value], target.shape, target.layout)
            return
        source = as_gpu(value)
        if source.layout.memory is target.layout.memory:
            source = source.copy()
        kernels.copied(source.broadcast(target.shape).layout, target.layout)

    # --- methods that ndarray has as well ----------------------------------------------------------------------------

    def dot(self, other: Array) -> GpuArray:
        check_devices("dot", (self, other))
        return matmul(self, as_gpu(other))

    def sum(self, axis: Any = None, keepdims: bool = False, dtype: Any = float32) -> GpuArray:
        return reduced("sum", self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> GpuArray:
        return reduced("max", self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> GpuArray:
        return reduced("min", self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> GpuArray:
        total = self.sum(axis, keepdims)
        return compute("x0 * x1", (total, total.size / max(self.size, 1)))

    def var(self, axis: Any = None, keepdims: bool = False) -> GpuArray:
        centred = self - self.mean(axis, keepdims=True)
        return GpuArray.mean(centred * centred, axis, keepdims)


def is_basic(part: Any) -> bool:
    if part is None or part is Ellipsis:
        return True
    return isinstance(part, (int, slice)) and not isinstance(part, bool)


def whole_shape(size: int, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """`wanted` with its -1 worked out."""
    rest = 1
    for n in wanted:
        rest *= n if n != -1 else 1
    full = tuple((size // rest if rest else 0) if n == -1 else n for n in wanted)
    total = 1
    for n in full:
        total *= n
    if total != size:
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


def compute(expression: str, inputs: Any) -> GpuArray:
    """An elementwise expression; numbers (and arrays of one) become parameters, masks are uploaded."""
    shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
    layouts: list[Layout] = []
    scalars: list[float] = []
    text = expression.replace("x0", "{0}").replace("x1", "{1}")
    names = []
    for x in inputs:
        if isinstance(x, GpuArray) or np.ndim(x):
            names.append(f"x{len(layouts)}")
            layouts.append(as_gpu(x).broadcast(shape).layout)
        else:
            names.append(f"s{len(scalars)}()")
            scalars.append(float(x))
    return GpuArray(kernels.elementwise(text.format(*names), layouts, scalars, shape))


def reduced(name: str, x: GpuArray, axis: Any = None, keepdims: bool = False) -> GpuArray:
    over = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    over = tuple(d % x.ndim for d in over) if x.ndim else ()
    kept = [d for d in range(x.ndim) if d not in over]
    n = 1
    for d in over:
        n *= x.shape[d]
    if not n and name != "sum":
        raise ValueError(f"{name} of no numbers")
    rows = x.transpose((*kept, *over)).dense() if x.ndim else x  # (kept …, reduced …)
    count = 1
    for d in kept:
        count *= x.shape[d]
    out = kernels.reduce_rows(name, rows.layout, count, n)
    shape = tuple(1 if d in over else x.shape[d] for d in range(x.ndim) if keepdims or d not in over)
    return GpuArray(Layout(out.memory, shape, dense_strides(shape)))


def matmul(a: GpuArray, b: GpuArray) -> GpuArray:
    """NumPy's rules: vectors, matrices, and batches that broadcast."""
    left = a.reshape(1, -1) if a.ndim == 1 else a
    right = b.reshape(-1, 1) if b.ndim == 1 else b
    (m, k), n = left.shape[-2:], right.shape[-1]
    if k != right.shape[-2]:
        raise ValueError(f"shapes {a.shape} and {b.shape} do not fit")
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    count = int(np.prod(batch, dtype=int))
    shape = (*batch, *((m,) if a.ndim > 1 else ()), *((n,) if b.ndim > 1 else ()))
    if not (count and m and n and k):
        return as_gpu(np.zeros(shape, np.float32))
    operands = [as_batch(x, batch, count) for x in (left, right)]
    out = kernels.batches(operands[0].layout, operands[1].layout, count, m, n, k)
    return GpuArray(Layout(out.memory, shape, dense_strides(shape)))


def as_batch(x: GpuArray, batch: tuple[int, ...], count: int) -> GpuArray:
    """(…, r, c) → (count, r, c) as a view where the leading dimensions are one step apart, else as a copy."""
    rows, columns = x.layout.strides[-2:]
    if x.ndim == 2:
        return x.view((count, *x.shape), (0, rows, columns))
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


# --- NumPy's functions that are not ufuncs ---------------------------------------------------------------------------


def _reduction(name: str) -> Any:
    def run(x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None, **others: Any) -> Any:
        if others or not isinstance(x, GpuArray) or (dtype is not None and np.dtype(dtype) != float32):
            return NotImplemented
        return getattr(x, name)(axis, keepdims)

    return run


def _full(value: float) -> Any:
    def run(x: GpuArray, dtype: Any = None, shape: Any = None, **others: Any) -> Any:
        if others or (dtype is not None and np.dtype(dtype) != float32):
            return NotImplemented
        wanted = x.shape if shape is None else tuple(shape)
        return GpuArray(kernels.elementwise("s0()", [], [value], wanted))

    return run


def _swapaxes(x: GpuArray, a: int, b: int) -> GpuArray:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return x.transpose(order)


def _expand_dims(x: GpuArray, axis: int) -> GpuArray:
    shape = list(x.shape)
    shape.insert(axis if axis >= 0 else axis + x.ndim + 1, 1)
    return x.reshape(tuple(shape))


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


FUNCTIONS: dict[Any, Any] = {
    np.sum: _reduction("sum"),
    np.max: _reduction("max"),
    np.min: _reduction("min"),
    np.mean: _reduction("mean"),
    np.zeros_like: _full(0.0),
    np.ones_like: _full(1.0),
    np.broadcast_to: lambda x, shape: x.broadcast((shape,) if isinstance(shape, int) else tuple(shape)),
    np.swapaxes: _swapaxes,
    np.expand_dims: _expand_dims,
    np.concatenate: _concatenate,
    np.split: _split,
    np.ascontiguousarray: lambda x: x.dense(),
    np.may_share_memory: _may_share_memory,
    np.ndim: lambda x: x.ndim,
    np.shape: lambda x: x.shape,
}
