"""What a tensor can be asked for by name: most methods are the op of that name itself."""

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

    def any(self: T, dim: int | None = None) -> T:
        return reduce.truth(self, dim, np.any)

    def all(self: T, dim: int | None = None) -> T:
        return reduce.truth(self, dim, np.all)

    def reshape(self: T, *sizes: Any) -> T:
        return shape.reshape(self, sizes_of(sizes))

    view = reshape

    def permute(self: T, *dims: Any) -> T:
        return shape.permute(self, sizes_of(dims))

    def expand(self: T, *sizes: Any) -> T:
        return shape.expand(self, sizes_of(sizes))

    def clamp(self: T, min: Scalar | None = None, max: Scalar | None = None) -> T:
        return elementwise.clamp(self, min, max)

    def masked_fill(self: T, mask: T, value: Scalar) -> T:
        return elementwise.where(mask, value, self)

    def pow(self: T, exponent: Any) -> T:
        return elementwise.power(self, operand(self, exponent))


def operand(beside: T, value: Any) -> T | Scalar:
    """The other side of an operator: tensors and numbers as they are, arrays as tensors."""
    out: T | Scalar = make(beside, value) if isinstance(value, np.ndarray) else value
    return out


def sizes_of(given: tuple[Any, ...]) -> Sequence[int]:
    """`reshape(2, 3)` and `reshape((2, 3))` mean the same."""
    return given[0] if len(given) == 1 and isinstance(given[0], (tuple, list, range)) else given
