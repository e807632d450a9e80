"""Which type a result has: torch's rules, which differ from NumPy's where integers meet floats.

float32 + int64   → float32     (NumPy: float64)
int64 + 0.5       → float32     (NumPy: float64)
float32[3] + float64[]          → float32: a tensor with no dimensions only decides the kind
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from anytorch.errors import AnytorchError


def check_numpy(version: str) -> None:
    """NumPy 1 lets a plain number turn a float32 without dimensions into float64, and every loss with it."""
    if int(version.partition(".")[0]) < 2:
        raise AnytorchError(
            f"anytorch.lite needs NumPy 2, whose types do not depend on values; this is NumPy {version}",
            hint="pip install 'numpy>=2'",
        )


check_numpy(np.__version__)

# A NumPy array, or one on the GPU that answers to NumPy's functions (`lite.gpu.array`); NumPy's own types cannot say that.
Array: TypeAlias = Any
DType: TypeAlias = Any  # np.dtype
Scalar = bool | int | float

float32 = np.dtype(np.float32)
int64 = np.dtype(np.int64)
boolean = np.dtype(np.bool_)

BOOLEAN, INTEGER, FLOATING = range(3)
KINDS = {"b": BOOLEAN, "i": INTEGER, "u": INTEGER, "f": FLOATING}  # by NumPy's letter


def kind(dtype: DType) -> int:
    return KINDS[dtype.kind]


def is_floating(dtype: DType) -> bool:
    return bool(dtype.kind == "f")


def scalar_dtype(value: Scalar, beside: DType) -> DType:
    """The type of `tensor + value`: the tensor's own, unless the number is of a higher kind."""
    wanted = BOOLEAN if isinstance(value, bool) else INTEGER if isinstance(value, int) else FLOATING
    if wanted <= kind(beside):
        return beside
    return int64 if wanted == INTEGER else float32


def promoted(a: Array, b: Array) -> DType:
    """The type of `a + b`."""
    if a.dtype == b.dtype:
        return a.dtype
    if (a.ndim == 0) != (b.ndim == 0):
        small, large = (a, b) if a.ndim == 0 else (b, a)
        return small.dtype if kind(small.dtype) > kind(large.dtype) else large.dtype
    if kind(a.dtype) != kind(b.dtype):
        return max(a, b, key=lambda array: kind(array.dtype)).dtype
    return np.promote_types(a.dtype, b.dtype)
