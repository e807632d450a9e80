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

import sys
from collections.abc import Callable, Mapping
from typing import NoReturn


def not_yet(name: str, arrives_with: str) -> str:
    return f"{name} is documented, but not part of this version of anytorch: it arrives with {arrives_with}"


def later(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` for names that are still to come: `__getattr__ = later(__name__, {"Engine": "…"})`.

    Reading an attribute raises AttributeError, so that `hasattr` keeps its meaning. `from module import Engine` would
    swallow that and say "cannot import name" instead; the import machinery asks first, and is told with ImportError.
    """

    def missing(name: str) -> NoReturn:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        sentence = not_yet(f"{module}.{name}", names[name])
        if "importlib" in sys._getframe(1).f_code.co_filename:  # "<frozen importlib._bootstrap>"
            raise ImportError(sentence, name=module)
        raise AttributeError(sentence)

    return missing
