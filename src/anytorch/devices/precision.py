"""Autocast with the dtype that is fast on the device, not the one that is torch's default for its type."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from anytorch import config
from anytorch.devices.locate import locate

if TYPE_CHECKING:
    import torch


def autocast_dtype(device: str | torch.device | None = None) -> str | None:
    """"bfloat16", "float16", or None where autocast would make things slower.

    torch's own default for the CPU is bfloat16 everywhere; on a CPU without bf16 instructions that made a Linear layer
    2.9 times slower. `anytorch optimize --apply` may have measured and stored another answer for the CPU.
    """
    backend, index = locate(device)
    if backend.torch_type == "cpu" and (chosen := config.get("cpu_dtype")) is not None:
        return None if chosen == "float32" else str(chosen)
    return backend.caps(index).autocast_dtype


def autocast(device: str | torch.device | None = None, *, enabled: bool = True) -> AbstractContextManager[Any]:
    """`with anytorch.autocast("auto"): model(x)`: mixed precision where it pays, plain float32 where it does not."""
    import torch

    backend, _ = locate(device)
    dtype = autocast_dtype(device) if enabled else None
    if dtype is None:
        return nullcontext()
    return torch.autocast(backend.torch_type, dtype=getattr(torch, dtype))
