"""The back end in force: listed, set and asked for under YiRage's names."""

from __future__ import annotations

from enum import Enum
from typing import Any

from anytorch import settings
from anytorch.devices.choose import resolve, usable_devices
from anytorch.devices.registry import registry
from anytorch.errors import UnknownDevice


class BackendType(str, Enum):
    """A back end's name. It is text (`BackendType.CUDA == "cuda"`) and has the documented `.value`.

    Ours are members. A plug-in's is made when it is asked for by value, `BackendType("counted")`: plug-ins are known
    only when they are loaded, which importing this module must not do. It then is the same object every time.
    """

    CUDA = "cuda"
    ROCM = "rocm"
    NPU = "npu"
    XPU = "xpu"
    MPS = "mps"
    WEBGPU = "webgpu"
    CPU = "cpu"

    # As enum.StrEnum does from Python 3.11 on; without them f"{backend}" differs between Python versions.
    def __str__(self) -> str:
        return str.__str__(self)

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)

    @classmethod
    def _missing_(cls, value: object) -> BackendType | None:
        if not isinstance(value, str):
            return None
        try:
            name = registry().get(value).name
        except UnknownDevice:
            return None  # enum's own ValueError follows: that is what `BackendType(...)` raises by contract
        known = _FROM_PLUGINS.get(name) or next((member for member in cls if member._value_ == name), None)
        if known is None:
            known = str.__new__(cls, name)
            known._name_ = name.upper()
            known._value_ = name
            known = _FROM_PLUGINS.setdefault(name, known)
        return known


_FROM_PLUGINS: dict[str, BackendType] = {}


def get_available_backends() -> list[BackendType]:
    """The back ends that can be used here, best first. The CPU is among them wherever torch is installed.

    A software adapter (llvmpipe) makes no back end available: it is the CPU, only slower, for requests by name.
    """
    names = dict.fromkeys(device.backend for device in usable_devices() if not device.software)
    return [BackendType(name) for name in names]


def set_backend(backend: str | BackendType) -> BackendType:
    """Use this back end wherever none is named, from now on: "auto", "cuda", "cpu", "cuda:1", …

    Returns the one that is now in force.

    One that is missing becomes the CPU, with a DeviceFallbackWarning that says why; an unknown one raises UnknownDevice
    with the nearest match, and nothing changes.

    The choice holds for the whole process, threads started later included: programs set it once at the top, and a
    worker thread that quietly computed on another device would be worse than a global. `with anytorch.use(backend=...)`
    is the scoped form; it is stronger than this one, and holds for one thread or task.

    New tensors go there, too: torch's default device in this thread is the back end's. Tensors that were made before
    stay where they are.
    """
    text = str(backend).strip() or "auto"
    resolution = resolve(text)
    settings.override("backend", resolution.chosen.backend if resolution.fell_back else text)
    _make_tensors_on(resolution.device)
    return BackendType(resolution.chosen.backend)


def _make_tensors_on(device: Any) -> None:
    """Make this torch's default device; for the CPU, which it is by itself, take away what an earlier call put there."""
    import torch

    if device.type != "cpu":
        torch.set_default_device(device)
    elif torch.get_default_device().type != "cpu":
        torch.set_default_device(None)


def get_backend() -> BackendType:
    """The back end in force: what `set_backend` chose, else the configured one, else the best."""
    return BackendType(resolve(None).chosen.backend)
