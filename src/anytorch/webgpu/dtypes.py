"""What the shaders of this adapter can do with torch's dtypes."""

from __future__ import annotations

import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.types import KINDS, supported

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def name_of(dtype: torch.dtype) -> str:
    """The name by which shaders know a dtype."""
    return str(dtype)[6:]  # "torch.float32"


def computable(*dtypes: torch.dtype) -> bool:
    """Can shaders on this adapter compute with all of these?"""
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
