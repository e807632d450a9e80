"""The names the source projects documented, with their keys and semantics: thin over the device layer.

    lookup     one device, usable or with the reason why not
    system     get_device, get_device_info, get_memory_info, …      (AI-OS Diffusion, Kronos, Virtual Blackwell)
    backend    DeviceBackend, UnifiedDeviceManager, …               (Virtual Blackwell)
    selection  BackendType, set_backend, get_backend, …             (YiRage)

Two rules hold for all of them. A function that is handed no device answers for the configured one (`set_backend`,
`ANYTORCH_BACKEND`, the settings file) and for the best one if nothing is configured; only `get_best_device` asks for
the best whatever is configured. And none of them initialises a driver: what is told about a device comes from the
probes and the child process until the caller uses it.
"""

from __future__ import annotations

from anytorch.devices.documented.backend import (
    DeviceBackend,
    UnifiedDeviceManager,
    get_device_manager,
    get_unified_backend,
)
from anytorch.devices.documented.selection import BackendType, get_available_backends, get_backend, set_backend
from anytorch.devices.documented.system import (
    get_accelerator_type,
    get_best_device,
    get_device,
    get_device_info,
    get_memory_info,
    is_cuda_available,
    is_npu_available,
    memory_cleanup,
    resolve_device,
    set_seed,
)

__all__ = [
    "BackendType",
    "DeviceBackend",
    "UnifiedDeviceManager",
    "get_accelerator_type",
    "get_available_backends",
    "get_backend",
    "get_best_device",
    "get_device",
    "get_device_info",
    "get_device_manager",
    "get_memory_info",
    "get_unified_backend",
    "is_cuda_available",
    "is_npu_available",
    "memory_cleanup",
    "resolve_device",
    "set_backend",
    "set_seed",
]
