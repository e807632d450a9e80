"""What the shaders of this adapter can do with torch's dtypes."""

from __future__ import annotations

import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.types import KINDS, supported

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    """The name by which shaders know a dtype."""
    return str(dtype)[6:]  # "torch.float32"


# What torch calls them in its errors.
_IN_ERRORS = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def spoken(dtype: torch.dtype) -> str:
    """The name of a dtype in torch's own errors: "Long" for torch.int64."""
    return _IN_ERRORS.get(dtype, str(dtype))


def cannot_cast(result: torch.dtype, target: torch.dtype) -> RuntimeError:
    """Torch's own error for a result that may not be put into a tensor of dtype `target`."""
    return RuntimeError(f"result type {spoken(result)} can't be cast to the desired output type {spoken(target)}")


def computable(*dtypes: torch.dtype) -> bool:
    """Whether shaders on this adapter can compute with all of these."""
    features = open_runtime().features
    return all(supported(name_of(dtype), features) for dtype in dtypes)


def usable(*dtypes: torch.dtype) -> bool:
    """The same for kernels that leave float64 to the CPU: few GPUs have it."""
    return torch.float64 not in dtypes and computable(*dtypes)


def word_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel whose threads do not own whole words writes instead of a narrow dtype; a copy narrows it after."""
    if KINDS[name_of(dtype)].lanes == 1:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int32
