"""Turn any name of a device into its back end and index, without trying the device."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anytorch.devices.choose import resolve
from anytorch.devices.protocol import Backend
from anytorch.devices.ranking import parse, rank
from anytorch.devices.registry import registry
from anytorch.probe import snapshot

if TYPE_CHECKING:
    import torch


def locate(device: str | torch.device | None) -> tuple[Backend, int]:
    """The back end and index of "cuda:1", torch.device("npu", 0), "auto" or None (the configured device).

    It need not exist: see `require`. A name without a number means the best card that files show, as for `resolve`.
    """
    known = registry()
    if device is not None and not isinstance(device, str):
        return by_torch_type(device.type), device.index or 0
    wanted = parse(device, known) if device is not None else None
    if wanted is None or wanted.backend is None:
        chosen = resolve(device).chosen
        return known.get(chosen.backend), chosen.index
    backend = known.get(wanted.backend)
    if wanted.index is not None:
        return backend, wanted.index
    seen = rank(backend.seen(snapshot())) if backend.name != "cpu" else []
    return backend, seen[0].index if seen else 0


def require(device: str | torch.device | None) -> tuple[Backend, int]:
    """The same for a device that is about to be used. Raises DeviceUnavailable or TorchMissing with the reasons."""
    if device is not None and not isinstance(device, str):
        return locate(device)  # torch has made it: it exists, or torch says so itself
    text = "" if device is None else device.strip().lower()
    if text not in _required:
        chosen = resolve(device, strict=device is not None).chosen
        if device is None:
            return registry().get(chosen.backend), chosen.index
        _required[text] = (chosen.backend, chosen.index)  # used in loops: asked once per process
    name, index = _required[text]
    return registry().get(name), index


_required: dict[str, tuple[str, int]] = {}


def by_torch_type(torch_type: str) -> Backend:
    """The back end of a torch device type. "cuda" may be ROCm's: the loaded torch tells."""
    known = registry()
    matching = [backend for backend in known.backends.values() if backend.torch_type == torch_type]
    if len(matching) > 1:
        torch = sys.modules.get("torch")
        is_hip = torch is not None and torch.version.hip is not None
        matching = [backend for backend in matching if (backend.name == "rocm") == is_hip] or matching
    return matching[0] if matching else known.get(torch_type)
