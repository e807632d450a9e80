"""Between the host's memory and the GPU, as recorded ops: gradients travel back the same way."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from anytorch.lite.autograd import Base, record
from anytorch.lite.device import DEFAULT, CustomDevice
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


def through_host(function: Function) -> Function:
    """For ops that have no kernels: tensors on the GPU are carried to the host, and the result back. It is counted."""

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        gpu = next((a.device for a in args if isinstance(a, Base) and a.device.is_gpu), None)
        if gpu is None:
            return function(*args, **options)
        from anytorch.lite.gpu.array import fallbacks

        fallbacks[function.__name__] += 1
        here = (carried(a, DEFAULT) if isinstance(a, Base) and a.device.is_gpu else a for a in args)
        result = function(*here, **options)
        return tuple(carried(r, gpu) for r in result) if isinstance(result, tuple) else carried(result, gpu)

    return run  # type: ignore[return-value]
