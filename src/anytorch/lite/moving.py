"""Between the host's memory and the GPU, as recorded ops: gradients travel back the same way."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.device import CustomDevice
from anytorch.lite.dtypes import Array

T = TypeVar("T", bound=Base)
Function = TypeVar("Function", bound=Callable[..., Any])


def on_device(host: Array, device: CustomDevice) -> Array:
    if not device.is_gpu:
        return host
    from anytorch.lite.gpu.array import upload

    return upload(host)


def carried(x: T, device: CustomDevice) -> T:
    """A copy of `x` on the other side."""
    if device.is_gpu:
        out = record("to", on_device(x.data, device), (x,), lambda g: (np.asarray(g),))
    else:
        gpu = x.device
        out = record("to", np.asarray(x.data), (x,), lambda g: (on_device(g, gpu),))
    out.device = device
    return out


def on_gpu(function: Function) -> Function:
    """For a function of arrays that NumPy does not have: arrays on the GPU go to its namesake in `gpu.functions`.

    So do NumPy's own functions find their kernels (see `gpu.array`): an op is written once, and its arrays decide.
    """
    name = function.__name__

    @wraps(function)
    def run(x: Array, *rest: Any) -> Any:
        if isinstance(x, (np.ndarray, np.generic)):
            return function(x, *rest)
        from anytorch.lite.gpu import functions

        return getattr(functions, name)(x, *rest)

    return run  # type: ignore[return-value]
