"""What a tensor can be asked for by name: each method passes on to the op of that name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from anytorch.lite.autograd import Base, make
from anytorch.lite.dtypes import Scalar
from anytorch.lite.ops import elementwise, linear, reduce, rows, shape
from anytorch.lite.ops.reduce import Dim

T = TypeVar("T", bound="OpMethods")


class OpMethods(Base):
    """Ops as methods; `CustomTensor` adds what a tensor is, its operators and writing in place."""

    __slots__ = ()

    def __getitem__(self: T, index: Any) -> T:
        return shape.getitem(self, index)

    def matmul(self: T, other: T) -> T:
        return linear.matmul(self, other)

    def sum(self: T, dim: Dim = None, keepdim: bool = False) -> T:
        return reduce.sum_of(self, dim, keepdim)

    def mean(self: T, dim: Dim = None, keepdim: bool = False) -> T:
        return reduce.mean(self, dim, keepdim)

    def var(self: T, dim: Dim = None, keepdim: bool = False, correction: int = 1) -> T:
        return reduce.var(self, dim, keepdim, correction)

    def std(self: T, dim: Dim = None, keepdim: bool = False, correction: int = 1) -> T:
        return elementwise.sqrt(reduce.var(self, dim, keepdim, correction))

    def amax(self: T, dim: Dim = None, keepdim: bool = False) -> T:
        return reduce.extreme(self, dim, keepdim, "amax")

    def amin(self: T, dim: Dim = None, keepdim: bool = False) -> T:
        return reduce.extreme(self, dim, keepdim, "amin")

    def max(self: T, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest number; with `dim`, the pair (values, indices)."""
        return self.amax() if dim is None else reduce.extreme_along(self, dim, keepdim, largest=True)

    def min(self: T, dim: int | None = None, keepdim: bool = False) -> Any:
        return self.amin() if dim is None else reduce.extreme_along(self, dim, keepdim, largest=False)

    def argmax(self: T, dim: int | None = None, keepdim: bool = False) -> T:
        return reduce.arg_extreme(self, dim, keepdim, largest=True)

    def argmin(self: T, dim: int | None = None, keepdim: bool = False) -> T:
        return reduce.arg_extreme(self, dim, keepdim, largest=False)

    def cumsum(self: T, dim: int) -> T:
        return reduce.cumsum(self, dim)

    def any(self: T, dim: int | None = None) -> T:
        return reduce.truth(self, dim, np.any)

    def all(self: T, dim: int | None = None) -> T:
        return reduce.truth(self, dim, np.all)

    def reshape(self: T, *sizes: Any) -> T:
        return shape.reshape(self, sizes_of(sizes))

    view = reshape

    def permute(self: T, *dims: Any) -> T:
        return shape.permute(self, sizes_of(dims))

    def transpose(self: T, a: int, b: int) -> T:
        return shape.swap(self, a, b)

    def expand(self: T, *sizes: Any) -> T:
        return shape.expand(self, sizes_of(sizes))

    def squeeze(self: T, dim: int | None = None) -> T:
        return shape.squeeze(self, dim)

    def unsqueeze(self: T, dim: int) -> T:
        return shape.unsqueeze(self, dim)

    def flatten(self: T, start: int = 0, end: int = -1) -> T:
        return shape.flatten(self, start, end)

    def split(self: T, size: int, dim: int = 0) -> tuple[T, ...]:
        return shape.split(self, size, dim)

    def contiguous(self: T) -> T:
        return shape.contiguous(self)

    def clone(self: T) -> T:
        return shape.clone(self)

    def clamp(self: T, min: Scalar | None = None, max: Scalar | None = None) -> T:
        return elementwise.clamp(self, min, max)

    def softmax(self: T, dim: int = -1) -> T:
        return rows.softmax(self, dim)

    def log_softmax(self: T, dim: int = -1) -> T:
        return rows.log_softmax(self, dim)

    def masked_fill(self: T, mask: T, value: Scalar) -> T:
        return elementwise.where(mask, value, self)

    def abs(self: T) -> T:
        return elementwise.absolute(self)

    __abs__ = abs

    def exp(self: T) -> T:
        return elementwise.exp(self)

    def log(self: T) -> T:
        return elementwise.log(self)

    def sqrt(self: T) -> T:
        return elementwise.sqrt(self)

    def sin(self: T) -> T:
        return elementwise.sin(self)

    def cos(self: T) -> T:
        return elementwise.cos(self)

    def tanh(self: T) -> T:
        return elementwise.tanh(self)

    def sigmoid(self: T) -> T:
        return elementwise.sigmoid(self)

    def relu(self: T) -> T:
        return elementwise.relu(self)

    def pow(self: T, exponent: Any) -> T:
        return elementwise.power(self, operand(self, exponent))


def operand(beside: T, value: Any) -> T | Scalar:
    """The other side of an operator: tensors and numbers as they are, arrays as tensors."""
    out: T | Scalar = make(beside, value) if isinstance(value, np.ndarray) else value
    return out


def sizes_of(given: tuple[Any, ...]) -> Sequence[int]:
    """`reshape(2, 3)` and `reshape((2, 3))` mean the same."""
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list, range)) else given
