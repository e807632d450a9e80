"""Memory of a device, and giving it back. Nothing here initialises a driver that is not initialised yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.devices.locate import locate, require
from anytorch.devices.registry import registry
from anytorch.devices.types import MemoryUse

if TYPE_CHECKING:
    import torch


def memory(device: str | torch.device | None = None) -> MemoryUse:
    """Bytes allocated, reserved, peak, free and total on a device; None for what nobody knows, never 0 for that.

    >>> import anytorch
    >>> anytorch.memory("cpu").total > 0
    True
    """
    backend, index = locate(device)
    return backend.memory(index)


def cleanup(device: str | torch.device | None = None) -> None:
    """Collect garbage, then give cached device memory back: of one device's back end, or of all of them."""
    import gc
    import sys

    gc.collect()
    if "torch" not in sys.modules:
        return  # nothing can have been allocated
    if device is not None:
        locate(device)[0].empty_cache()
        return
    for backend in registry().backends.values():
        backend.empty_cache()


def synchronize(device: str | torch.device | None = None) -> None:
    """Wait until the device has finished what it was given. Raises DeviceUnavailable if there is no such device."""
    backend, index = require(device)
    backend.synchronize(index)
