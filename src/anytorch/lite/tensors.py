"""CustomTensor: NumPy's numbers with torch's manners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, array, grad_enabled, make
from anytorch.lite.device import CustomDevice, as_device
from anytorch.lite.dtypes import Array, DType, Scalar, float32, int64, is_floating, kind
from anytorch.lite.moving import carried, on_device
from anytorch.lite.ops import elementwise, linear, reduce, rows, shape
from anytorch.lite.ops.reduce import Dim

_host = np.ndarray
Operator = Callable[["CustomTensor", Any], "CustomTensor"]


def operand(beside: CustomTensor, value: Any) -> CustomTensor | Scalar:
    """The other side of an operator: tensors and numbers as they are, arrays as tensors."""
    out: CustomTensor | Scalar = make(beside, value) if isinstance(value, np.ndarray) else value
    return out


def operator(ufunc: Any, general: Callable[..., CustomTensor]) -> Operator:
    """Operators such as `a + b`: straight to NumPy where no gradient is wanted and the types agree, else through `general`.

    Of the time to add two small tensors most goes to what surrounds the addition, so this is written for few steps; a test
    counts them.
    """

    def run(self: CustomTensor, other: Any) -> CustomTensor:
        dtype = self.plain
        if dtype is None:
            return general(self, operand(self, other))
        if (type(other) is Result or type(other) is CustomTensor) and dtype is other.plain:
            c = ufunc(self.data, other.data)
        elif type(other) is float and dtype.kind == "f":  # NumPy 2 lets a plain number take the array's type
            c = ufunc(self.data, other)
        else:
            return general(self, operand(self, other))
        out = Result()
        out.data = c if type(c) is _host else array(c)
        out.device = self.device
        out.plain = dtype
        return out

    return run


def beside(general: Callable[..., CustomTensor]) -> Operator:
    return lambda self, other: general(self, operand(self, other))


def reflected(general: Callable[..., CustomTensor]) -> Operator:
    """`2 - tensor` and similar operators."""
    return lambda self, other: general(operand(self, other), self)


def compared(ufunc: Any) -> Operator:
    return lambda self, other: elementwise.compare(self, operand(self, other), ufunc)


def in_place(compute: Callable[[Any, Any], CustomTensor]) -> Operator:
    return lambda self, other: self._write(lambda x: compute(x, other))


class CustomTensor(Base):
    """`CustomTensor([1, 2, 3])`: float32 unless `dtype` says otherwise, on the host unless `device` does.

    `data` is the NumPy array itself. With `requires_grad=True`, `backward()` on what is made from it fills `.grad`.
    """

    __array_ufunc__ = None  # `ndarray + tensor` asks the tensor
    __hash__ = object.__hash__

    # Ops that are methods as they are.
    __abs__ = elementwise.absolute
    __getitem__ = shape.getitem
    __neg__ = elementwise.neg
    abs = elementwise.absolute
    clone = shape.clone
    contiguous = shape.contiguous
    cos = elementwise.cos
    cumsum = reduce.cumsum
    exp = elementwise.exp
    flatten = shape.flatten
    log = elementwise.log
    log_softmax = rows.log_softmax
    matmul = linear.matmul
    mean = reduce.mean
    relu = elementwise.relu
    sigmoid = elementwise.sigmoid
    sin = elementwise.sin
    softmax = rows.softmax
    split = shape.split
    sqrt = elementwise.sqrt
    squeeze = shape.squeeze
    sum = reduce.sum_of
    tanh = elementwise.tanh
    transpose = shape.swap
    unsqueeze = shape.unsqueeze
    var = reduce.var

    def __init__(
        self,
        data: Any,
        device: CustomDevice | str | None = None,
        dtype: Any = None,
        requires_grad: bool = False,
    ) -> None:
        self.device = as_device(device)
        host = np.array(data.data if isinstance(data, Base) else data, dtype=dtype or float32)
        if host.dtype.kind not in "fiub":
            raise UsageError(f"a tensor holds numbers, not {host.dtype}")
        self.data = on_device(host, self.device)
        self.plain = host.dtype
        if requires_grad:
            self.requires_grad_()

    # --- what it is --------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.data.shape
        return shape

    @property
    def dtype(self) -> DType:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    @property
    def T(self) -> CustomTensor:
        return shape.permute(self, range(self.data.ndim)[::-1])

    def size(self, dim: int | None = None) -> Any:
        return self.data.shape if dim is None else self.data.shape[dim]

    def dim(self) -> int:
        return len(self.data.shape)

    def numel(self) -> int:
        return int(self.data.size)

    def __len__(self) -> int:
        if not self.data.ndim:
            raise TypeError("len() of a tensor without dimensions is undefined")
        return int(self.data.shape[0])

    def __iter__(self) -> Iterator[CustomTensor]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        text = np.array2string(np.asarray(self.data), separator=", ", prefix="CustomTensor(")
        extra = "" if self.dtype == float32 else f", dtype={self.dtype}"
        extra += f", grad_fn={self.grad_fn!r}" if self.grad_fn else ", requires_grad=True" if self.requires_grad else ""
        return f"CustomTensor({text}, device='{self.device}'{extra})"

    # --- out of it ---------------------------------------------------------------------------------------------------

    def item(self) -> Any:
        if self.data.size != 1:
            raise UsageError(f".item() of a tensor of shape {self.shape}: it has {self.data.size} numbers, not one")
        return self.data.item()

    def tolist(self) -> Any:
        return self.data.tolist()

    def numpy(self) -> Array:
        """The numbers as a NumPy array: the same memory on the host, a copy from the GPU."""
        if self.requires_grad:
            raise UsageError(".numpy() does not work on a tensor that requires gradients", hint="use .detach().numpy()")
        return np.asarray(self.data)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        host = self.numpy()
        wanted = host.astype(dtype, copy=False) if dtype is not None else host
        return wanted.copy() if copy and wanted is host else wanted

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.numpy().__dlpack_device__()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if is_floating(self.dtype):
            raise TypeError("only whole-number tensors can be an index")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.data.size != 1:
            raise UsageError(f"the truth of a tensor of shape {self.shape} is ambiguous", hint="use .any() or .all()")
        return bool(self.item())

    # --- gradients and places ----------------------------------------------------------------------------------------

    def requires_grad_(self, wanted: bool = True) -> CustomTensor:
        if wanted and not is_floating(self.dtype):
            raise UsageError(f"only floating-point tensors can require gradients; this one is {self.dtype}")
        if self.grad_fn is not None and not wanted:
            raise UsageError("this tensor was computed; use .detach() to cut it off")
        self.requires_grad = wanted
        return self

    def detach(self) -> CustomTensor:
        """The same memory, without the history."""
        out: CustomTensor = make(self, self.data)
        out._version = self._shared_version()
        out._is_view = True
        return out

    def zero_grad(self) -> None:
        self.grad = None

    def to(self, *wanted: Any) -> CustomTensor:
        """`.to(device)`, `.to(dtype)`, `.to(device, dtype)`."""
        out = self
        for each in wanted:
            if isinstance(each, CustomDevice) or (isinstance(each, str) and not _is_dtype(each)):
                out = move(out, as_device(each))
            elif out.dtype != np.dtype(each):
                out = elementwise.cast_to(out, np.dtype(each))
        return out

    def cpu(self) -> CustomTensor:
        return move(self, as_device(None)) if self.device.is_gpu else self

    def float(self) -> CustomTensor:
        return self.to(float32)

    def double(self) -> CustomTensor:
        return self.to(np.float64)

    def half(self) -> CustomTensor:
        return self.to(np.float16)

    def long(self) -> CustomTensor:
        return self.to(int64)

    # --- ops by name -------------------------------------------------------------------------------------------------

    def std(self, dim: Dim = None, keepdim: bool = False, correction: int = 1) -> CustomTensor:
        return elementwise.sqrt(reduce.var(self, dim, keepdim, correction))

    def amax(self, dim: Dim = None, keepdim: bool = False) -> CustomTensor:
        return reduce.extreme(self, dim, keepdim, "amax")

    def amin(self, dim: Dim = None, keepdim: bool = False) -> CustomTensor:
        return reduce.extreme(self, dim, keepdim, "amin")

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest number; with `dim`, the pair (values, indices)."""
        return self.amax() if dim is None else reduce.extreme_along(self, dim, keepdim, largest=True)

    def min(self, dim: int | None = None, keepdim: bool = False) -> Any:
        return self.amin() if dim is None else reduce.extreme_along(self, dim, keepdim, largest=False)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> CustomTensor:
        return reduce.arg_extreme(self, dim, keepdim, largest=True)

    def argmin(self, dim: int | None = None, keepdim: bool = False) -> CustomTensor:
        return reduce.arg_extreme(self, dim, keepdim, largest=False)

    def any(self, dim: int | None = None) -> CustomTensor:
        return reduce.truth(self, dim, np.any)

    def all(self, dim: int | None = None) -> CustomTensor:
        return reduce.truth(self, dim, np.all)

    def reshape(self, *sizes: Any) -> CustomTensor:
        return shape.reshape(self, sizes_of(sizes))

    view = reshape

    def permute(self, *dims: Any) -> CustomTensor:
        return shape.permute(self, sizes_of(dims))

    def expand(self, *sizes: Any) -> CustomTensor:
        return shape.expand(self, sizes_of(sizes))

    def clamp(self, min: Scalar | None = None, max: Scalar | None = None) -> CustomTensor:
        return elementwise.clamp(self, min, max)

    def masked_fill(self, mask: CustomTensor, value: Scalar) -> CustomTensor:
        return elementwise.where(mask, value, self)

    def pow(self, exponent: Any) -> CustomTensor:
        return elementwise.power(self, operand(self, exponent))

    # --- arithmetic --------------------------------------------------------------------------------------------------

    __add__ = operator(np.add, elementwise.add)
    __sub__ = operator(np.subtract, elementwise.sub)
    __mul__ = operator(np.multiply, elementwise.mul)

    def __matmul__(self, other: CustomTensor) -> CustomTensor:
        if type(other) is Result or type(other) is CustomTensor:
            dtype, a, b = self.plain, self.data, other.data
            if dtype is not None and dtype is other.plain and a.ndim == b.ndim == 2:
                try:
                    c = a.dot(b)
                except ValueError:
                    return linear.matmul(self, other)  # whose message names the shapes
                out = Result()
                out.data = c
                out.device = self.device
                out.plain = dtype
                return out
        if not isinstance(other, Base):
            return NotImplemented
        return linear.matmul(self, other)

    __radd__ = reflected(elementwise.add)
    __rmul__ = reflected(elementwise.mul)
    __rsub__ = reflected(elementwise.sub)
    __truediv__ = beside(elementwise.div)
    __rtruediv__ = reflected(elementwise.div)
    __pow__ = beside(elementwise.power)
    __rpow__ = reflected(elementwise.power)
    __eq__ = compared(np.equal)  # type: ignore[assignment]
    __ne__ = compared(np.not_equal)  # type: ignore[assignment]
    __lt__ = compared(np.less)
    __le__ = compared(np.less_equal)
    __gt__ = compared(np.greater)
    __ge__ = compared(np.greater_equal)
    __and__ = compared(np.bitwise_and)
    __or__ = compared(np.bitwise_or)

    def __invert__(self) -> CustomTensor:
        out: CustomTensor = make(self, np.invert(self.data))
        return out

    # --- in place ----------------------------------------------------------------------------------------------------

    def _write(self, compute: Callable[[CustomTensor], CustomTensor]) -> CustomTensor:
        """Replace the numbers by `compute(self)`, in the same memory, and put that op into the history."""
        source: CustomTensor = make(self, self.data)
        if self.requires_grad and grad_enabled():
            if self.is_leaf or self._is_view:
                what = "a leaf that requires gradients" if self.is_leaf else "a view of a tensor with a history"
                raise UsageError(
                    f"{what} cannot be changed in place",
                    hint="make a new tensor, or change it inside `with no_grad():`",
                )
            source.data = self.data.copy()  # the op may need the numbers as they were
            source.requires_grad, source.grad_fn = True, self.grad_fn
        result = compute(source)
        if result.shape != self.shape:
            raise UsageError(f"an in-place op would change the shape from {self.shape} to {result.shape}")
        if kind(result.dtype) > kind(self.dtype):
            raise UsageError(f"the {result.dtype} result cannot be written into a {self.dtype} tensor")
        if result.requires_grad:
            if self._is_view:
                raise UsageError(
                    "a view cannot get a gradient history in place", hint="make a new tensor, or write to its base"
                )
            if not source.requires_grad and source.data is self.data:
                result = compute(clone_of(source))  # the other operand has a history: keep what its gradient needs
            self.requires_grad, self.grad_fn = True, result.grad_fn
        self.data[...] = result.data
        self._shared_version().count += 1
        return self

    __iadd__ = add_ = in_place(lambda x, other: x + other)
    __isub__ = sub_ = in_place(lambda x, other: x - other)
    __imul__ = mul_ = in_place(lambda x, other: x * other)
    __itruediv__ = div_ = in_place(lambda x, other: x / other)

    def copy_(self, other: CustomTensor) -> CustomTensor:
        return self._write(lambda x: shape.expand(other.to(x.dtype), x.shape))

    def fill_(self, value: Scalar) -> CustomTensor:
        return self._write(lambda x: make(x, np.full_like(x.data, value)))

    def zero_(self) -> CustomTensor:
        return self.fill_(0)

    def __setitem__(self, index: Any, value: Any) -> None:
        given = value if isinstance(value, CustomTensor) else make(self, np.asarray(value, self.dtype))
        if not (grad_enabled() and (self.requires_grad or given.requires_grad)):
            self.data[shape.plain_index(index)] = given.data
            self._shared_version().count += 1
            return
        self._write(lambda x: shape.with_item(x, index, given))


class Result(CustomTensor):
    """What an op makes. Its numbers are there already: with no `__init__` to call, `Result()` costs half as much."""

    if TYPE_CHECKING:

        def __init__(self) -> None: ...

    else:
        __init__ = object.__init__


CustomTensor._result = Result


class AutogradTensor(CustomTensor):
    """Document 4's name: `AutogradTensor(data, requires_grad=True)`, then `backward()` on what is made from it."""

    def __init__(self, data: Any, requires_grad: bool = False, device: CustomDevice | str | None = None) -> None:
        super().__init__(data, device=device, requires_grad=requires_grad)


def clone_of(x: CustomTensor) -> CustomTensor:
    out: CustomTensor = make(x, x.data.copy())
    return out


def _is_dtype(name: str) -> bool:
    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


def move(x: CustomTensor, device: CustomDevice) -> CustomTensor:
    """`x` on another device. Between names of the host's memory nothing is copied."""
    if device == x.device:
        return x
    if device.is_gpu != x.device.is_gpu:
        return carried(x, device)
    out = shape.view("to", x, x.data, lambda g: (g,))
    out.device = device
    return out


def sizes_of(given: tuple[Any, ...]) -> Sequence[int]:
    """`reshape(2, 3)` and `reshape((2, 3))` mean the same."""
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list, range)) else given
