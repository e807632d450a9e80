"""Devices by name and memory in gigabytes, as the documented functions tell of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytorch.devices.choose import Found, find, usable_devices
from anytorch.devices.registry import registry
from anytorch.devices.types import Backend, Candidate, MemoryUse
from anytorch.errors import DeviceIndexError

if TYPE_CHECKING:
    import torch

GIGABYTE = 2**30  # as the command line and `explain` count


def find_quietly(device: str | torch.device) -> Found:
    """As `find`, for yes-or-no questions: an index that does not exist is one more reason."""
    try:
        return find(device)
    except DeviceIndexError as exc:
        return Found(str(device), None, exc.message)


def usable_of(name: str) -> list[Candidate]:
    """The usable devices of a back end. "cuda" means ROCm's where those are what torch calls "cuda"."""
    devices = usable_devices(name)
    return [device for device in devices if device.backend == name] or [
        device for device in devices if device.torch_type == name
    ]


def backend_of(candidate: Candidate) -> Backend:
    return registry().get(candidate.backend)


def gigabytes_of(use: MemoryUse) -> dict[str, Any]:
    """Memory figures under the documented keys, in GB of 2**30 bytes; None where unknown."""
    return {
        "allocated_gb": _gigabytes(use.allocated),
        "reserved_gb": _gigabytes(use.reserved),
        "max_allocated_gb": _gigabytes(use.peak),
        "free_gb": _gigabytes(use.free),
        "total_gb": _gigabytes(use.total),
        "source": use.source,
    }


def _gigabytes(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / GIGABYTE, 9)  # to the byte
