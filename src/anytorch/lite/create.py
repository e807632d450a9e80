"""New tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base
from anytorch.lite.device import CustomDevice, as_device
from anytorch.lite.dtypes import KINDS, Array, DType, float32, int64
from anytorch.lite.moving import on_device
from anytorch.lite.tensors import CustomTensor, Result

Device = CustomDevice | str | None

# What becomes of Python's own numbers. NumPy's int is of 32 bits where pointers are: in WebAssembly.
PYTHONS: dict[DType, DType] = {np.dtype(np.float64): float32, np.dtype(np.intp): int64}

_random = np.random.default_rng()


def seed(value: int) -> None:
    """Seed the random numbers of this library (weights, dropout, `randn`)."""
    global _random
    _random = np.random.default_rng(value)


def generator() -> np.random.Generator:
    return _random


def wrap(data: Array, device: Device = None, requires_grad: bool = False) -> CustomTensor:
    """A tensor around an array, without a copy on the host."""
    out = Result()
    out.device = as_device(device)
    out.data = on_device(data, out.device)
    out.plain = out.data.dtype
    return out.requires_grad_() if requires_grad else out


def tensor(data: Any, dtype: Any = None, device: Device = None, requires_grad: bool = False) -> CustomTensor:
    """Like `torch.tensor`: keeps the type of arrays; Python's floats become float32, its integers int64."""
    host = np.array(data.data if isinstance(data, Base) else data, dtype=dtype)
    if dtype is None and not isinstance(data, (np.ndarray, np.generic, Base)):
        host = host.astype(PYTHONS.get(host.dtype, host.dtype), copy=False)
    if host.dtype.kind not in KINDS:
        raise UsageError(f"a tensor cannot hold {host.dtype}", hint="use numbers or booleans")
    return wrap(host, device, requires_grad)


def from_numpy(array: Array) -> CustomTensor:
    """A tensor that shares the array's memory."""
    return wrap(array)


def from_dlpack(other: Any) -> CustomTensor:
    """A tensor that shares the memory of another library's tensor on the CPU."""
    return wrap(np.from_dlpack(other))


def zeros(*shape: int, dtype: Any = float32, device: Device = None, requires_grad: bool = False) -> CustomTensor:
    return wrap(np.zeros(shape, dtype), device, requires_grad)


def ones(*shape: int, dtype: Any = float32, device: Device = None, requires_grad: bool = False) -> CustomTensor:
    return wrap(np.ones(shape, dtype), device, requires_grad)


def full(shape: tuple[int, ...], value: float, dtype: Any = float32, device: Device = None) -> CustomTensor:
    return wrap(np.full(shape, value, dtype), device)


def arange(*bounds: int, dtype: Any = None, device: Device = None) -> CustomTensor:
    return wrap(np.arange(*bounds, dtype=int64 if dtype is None else dtype), device)


def randn(*shape: int, dtype: Any = float32, device: Device = None, requires_grad: bool = False) -> CustomTensor:
    """Normally distributed numbers."""
    return wrap(_random.standard_normal(shape).astype(dtype), device, requires_grad)


def rand(*shape: int, dtype: Any = float32, device: Device = None, requires_grad: bool = False) -> CustomTensor:
    """Numbers from 0 to 1."""
    return wrap(_random.random(shape).astype(dtype), device, requires_grad)
