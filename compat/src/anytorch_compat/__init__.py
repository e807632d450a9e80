"""The names that other projects documented, with their keys and semantics, thin over anytorch's own functions.

    system     get_device, get_device_info, get_memory_info, …      (AI-OS Diffusion, Kronos, Virtual Blackwell)
    backend    DeviceBackend, UnifiedDeviceManager, …               (Virtual Blackwell)
    modes, stack   the modes and the VGPU stack                     (Virtual Blackwell)
    selection  BackendType, set_backend, get_backend, …             (YiRage)
    graphs     dtypes and thread-block graphs beside new_kernel_graph (YiRage, Mirage)
    advice, optimizer, measuring   configuration and benchmark      (YiRage)
    kronos, kronos_scripts         the published functions and training scripts (Kronos)
    lookup     what several of them ask about devices

The packages beside this one have the documented import paths and re-export from here. Two rules hold for the devices. A
function that is handed no device answers for the configured one (`set_backend`, `ANYTORCH_BACKEND`, the settings file) and
for the best one if nothing is configured. And none of them initialises a driver: what is told about a device comes from the
probes and the child process until the caller uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def needing_torch(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names whose home imports torch, which is imported when they are first asked for."""

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return found
