"""Measure and free device memory. Nothing here initialises a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.devices.choose import survey
from anytorch.devices.locate import locate, require
from anytorch.devices.registry import registry
from anytorch.devices.types import MemoryUse, State

if TYPE_CHECKING:
    import torch


def memory(device: str | torch.device | None = None) -> MemoryUse:
    """Bytes allocated, reserved, peak, free and total on a device; None, never 0, for what is unknown.

    >>> import anytorch
    >>> anytorch.memory("cpu").total > 0
    True
    """
    backend, index = locate(device)
    use = backend.memory(index)
    if use.total is None and not use.allocated and not exists(backend.name, index):
        return MemoryUse(
            source="there is no such device on this machine"
        )  # nothing is allocated on it, but that is no fact
    return use


def exists(backend: str, index: int) -> bool:
    return any(
        found.backend == backend and found.index == index and found.state is not State.UNUSABLE
        for found in survey("needed", wanted=backend).devices
    )


def cleanup(device: str | torch.device | None = None) -> None:
    """Collect garbage, then free cached device memory: of one device's back end, or of all."""
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
    """Wait until the device has finished its work. Raises DeviceUnavailable if there is no such device."""
    backend, index = require(device)
    backend.synchronize(index)
