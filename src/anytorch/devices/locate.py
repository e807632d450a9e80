"""From whatever names a device to its back end and index, without trying anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anytorch.devices.choose import resolve
from anytorch.devices.protocol import Backend
from anytorch.devices.ranking import parse
from anytorch.devices.registry import registry

if TYPE_CHECKING:
    import torch


def locate(device: str | torch.device | None) -> tuple[Backend, int]:
    """The back end and index of "cuda:1", torch.device("npu", 0), "auto" or None (the configured device)."""
    known = registry()
    if device is None or str(device).strip().lower() == "auto":
        chosen = resolve(device).chosen
        return known.get(chosen.backend), chosen.index
    if not isinstance(device, str):
        return by_torch_type(device.type), device.index or 0
    wanted = parse(device, known)
    if wanted.backend is None:
        chosen = resolve(device).chosen
        return known.get(chosen.backend), chosen.index
    return known.get(wanted.backend), wanted.index or 0


def by_torch_type(torch_type: str) -> Backend:
    """The back end behind a torch device type. "cuda" is ROCm's too: the torch that is loaded tells."""
    known = registry()
    matching = [backend for backend in known.backends.values() if backend.torch_type == torch_type]
    if len(matching) > 1:
        torch = sys.modules.get("torch")
        is_hip = torch is not None and torch.version.hip is not None
        matching = [backend for backend in matching if (backend.name == "rocm") == is_hip] or matching
    return matching[0] if matching else known.get(torch_type)
