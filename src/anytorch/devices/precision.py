"""Autocast with the dtype that is fast on the device, not the one that is torch's default for its type."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from anytorch import settings
from anytorch.devices.locate import require
from anytorch.devices.registry import registry
from anytorch.devices.tune.store import trusted_setting, tuned_for
from anytorch.devices.types import Caps

if TYPE_CHECKING:
    import torch


def autocast_dtype(device: str | torch.device | None = None) -> str | None:
    """ "bfloat16", "float16", or None where autocast would make things slower.

    torch's own default for the CPU is bfloat16 everywhere; on a CPU without bf16 instructions that made a Linear layer
    2.9 times slower. What `anytorch optimize --apply` has measured and stored on this machine goes first.
    """
    backend, index = require(device)
    if backend.torch_type == "cpu":
        chosen = trusted_setting("cpu_dtype").value  # measured on this machine, or set by hand
    else:
        tuned = tuned_for(device) if settings.stored("tuned") else None
        chosen = tuned.autocast_dtype if tuned is not None else None
    if chosen is not None:
        return None if chosen == "float32" else str(chosen)
    return capabilities(backend.name, index).autocast_dtype


@lru_cache(maxsize=64)
def capabilities(backend: str, index: int) -> Caps:
    """A device's capabilities, cached because `autocast` is called in training loops."""
    return registry().get(backend).caps(index)


def autocast(device: str | torch.device | None = None, *, enabled: bool = True) -> AbstractContextManager[Any]:
    """`with anytorch.autocast("auto"): model(x)`: mixed precision where it pays, plain float32 where it does not."""
    backend, _ = require(device)
    dtype = autocast_dtype(device) if enabled else None
    if dtype is None:
        return nullcontext()
    import torch

    return torch.autocast(backend.torch_type, dtype=getattr(torch, dtype))
