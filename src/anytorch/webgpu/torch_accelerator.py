"""`torch.accelerator` and torch.distributed's choice of a back end, for this device: torch answers the first in C++, where a
device under PrivateUse1 that is written in Python has no hook, and knows no process group for the second.

Once this device is registered it is torch's accelerator, whatever else is there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from anytorch.webgpu import reducer
from anytorch.webgpu.tensors import NAME


def register() -> None:
    memory: Any = getattr(torch.accelerator, "memory", None)  # since torch 2.9
    for name, function in FUNCTIONS.items():
        for owner in (torch.accelerator, memory):
            if hasattr(owner, name):
                setattr(owner, name, function)
    if torch.distributed.is_available():
        from anytorch.devices import staged_group  # needs a torch with collectives

        staged_group.offer(NAME)
        reducer.register()


def _module(device: Any) -> Any:
    """torch.webgpu, if the device is None or its one device."""
    module = getattr(torch, NAME)
    if device is not None and not isinstance(device, int) and torch.device(device).type != NAME:
        raise ValueError(f"{device} is not a device of the accelerator, which is {NAME}")
    if device is not None:
        module.set_device(device)
    return module


def synchronize(device: Any = None, /) -> None:
    """Wait until the device has done everything."""
    _module(device).synchronize()


def empty_cache() -> None:
    """Give back the memory that no tensor uses."""
    _module(None).empty_cache()


def memory_stats(device_index: Any = None, /) -> OrderedDict[str, Any]:
    """Bytes by the names that torch's own functions read them by."""
    module = _module(device_index)
    return OrderedDict(
        {
            "allocated_bytes.all.current": module.memory_allocated(),
            "allocated_bytes.all.peak": module.max_memory_allocated(),
            "reserved_bytes.all.current": module.memory_reserved(),
            "reserved_bytes.all.peak": module.max_memory_reserved(),
        }
    )


def reset_peak_memory_stats(device_index: Any = None, /) -> None:
    """Begin the peaks anew."""
    _module(device_index).reset_peak_memory_stats()


def get_memory_info(device_index: Any = None, /) -> tuple[int, int]:
    """(free, total) bytes."""
    free, total = _module(device_index).mem_get_info()
    return free, total


FUNCTIONS = {
    function.__name__: function
    for function in (synchronize, empty_cache, memory_stats, reset_peak_memory_stats, get_memory_info)
}
