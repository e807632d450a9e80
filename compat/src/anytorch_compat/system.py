"""The device, its facts and its memory, in the dictionaries the documents promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytorch.devices.choose import activate, find, resolve, usable_devices
from anytorch.devices.choose import device_info as get_device_info
from anytorch.devices.memory import cleanup
from anytorch.devices.ranking import parse
from anytorch.devices.registry import registry
from anytorch.devices.seeds import seed as seed_everything
from anytorch.devices.types import MemoryUse
from anytorch_compat.lookup import backend_of, gigabytes_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "get_accelerator_type",
    "get_best_device",
    "get_device",
    "get_device_info",
    "get_memory_info",
    "is_cuda_available",
    "is_npu_available",
    "memory_cleanup",
    "resolve_device",
    "set_seed",
]


def get_best_device() -> str:
    """The type of the configured or the best usable device: "cuda" (ROCm too), "npu", "xpu", "mps", "webgpu" or "cpu".

    Text, because it is documented as the argument of `torch.autocast(device_type=...)`; `best_device()` gives the
    `torch.device`.
    """
    chosen = resolve().chosen
    activate(chosen)  # so that the text means something to torch
    return chosen.torch_type


def get_device(force_cpu: bool = False, prefer_npu: bool = False) -> torch.device:
    """The device to compute on: the CPU if forced, an NPU first if preferred, else the configured or the best one."""
    if force_cpu:
        return resolve("cpu").device
    return resolve("auto" if prefer_npu else None, prefer_npu=prefer_npu).device


def resolve_device(device: str | torch.device | None = "auto") -> torch.device:
    """A device for "auto", "cpu", "cuda", "cuda:1", "mps", …; one that is missing becomes the CPU, with a warning.

    "auto" names no device, so it is the configured one (`KRONOS_DEVICE`, `ANYTORCH_BACKEND`, …) or the best. The
    warning is a DeviceFallbackWarning and carries the reasons; `resolve` returns them instead.
    """
    automatic = device is None or str(device).strip().lower() == "auto"
    return resolve(None if automatic else device).device


def get_accelerator_type() -> str:
    """The type of the device in use: "cuda", "npu" or "cpu" as documented, or another, such as "xpu", where it is."""
    found = find()
    return found.device.torch_type if found.device is not None else "cpu"


def is_cuda_available() -> bool:
    """True if a "cuda" device works. As in torch, an AMD GPU under ROCm is one."""
    return any(device.torch_type == "cuda" for device in usable_devices())


def is_npu_available() -> bool:
    """True if an NPU works. (`torch_npu` being installed is not enough.)"""
    return any(device.torch_type == "npu" for device in usable_devices())


def get_memory_info(device: str | torch.device | None = None) -> dict[str, Any]:
    """Memory in GiB (keys `…_gb`): of everything, as `ram`, `vram` and `npu_memory`, or of one named device.

    A named device that is not here gives `available: False` with a `reason`, and None for every figure. An unknown name
    raises UnknownDevice.
    """
    if device is not None:
        return _memory_of_one(device)
    vram: dict[str, Any] = {}
    npu_memory: dict[str, Any] = {}
    for candidate in usable_devices():
        if candidate.torch_type == "cpu" or candidate.software:
            continue
        figures = gigabytes_of(backend_of(candidate).memory(candidate.index))
        target = npu_memory if candidate.torch_type == "npu" else vram
        target[f"{candidate.torch_type}_{candidate.index}"] = figures
    return {"ram": _ram(), "vram": vram, "npu_memory": npu_memory}


def _ram() -> dict[str, Any]:
    figures = gigabytes_of(registry().get("cpu").memory(0))
    total, free = figures["total_gb"], figures["free_gb"]
    used = None if total is None or free is None else round(total - free, 9)
    return {
        "total_gb": total,
        "available_gb": free,
        "used_gb": used,
        "percent": None if used is None or not total else round(100 * used / total, 1),
        "process_gb": figures["allocated_gb"],
        "process_peak_gb": figures["max_allocated_gb"],
        "source": figures["source"],
    }


def _memory_of_one(device: str | torch.device) -> dict[str, Any]:
    automatic = str(device).strip().lower() == "auto"
    found = find(None if automatic else device)
    if found.device is None:
        named = parse(found.text, registry())
        nothing = gigabytes_of(MemoryUse())
        return {"backend": named.backend, "device": found.text, "available": False, "reason": found.why, **nothing}
    candidate = found.device
    return {
        "backend": candidate.backend,
        "device": candidate.torch_name,
        "device_name": candidate.name,
        "available": True,
        "reason": "",
        **gigabytes_of(backend_of(candidate).memory(candidate.index)),
    }


def memory_cleanup() -> None:
    """Collect garbage and free cached memory on every device in use."""
    cleanup()


def set_seed(seed: int = 42) -> None:
    """Seed Python, NumPy and torch on the CPU and every device."""
    seed_everything(seed)
