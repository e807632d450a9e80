"""Turn any name of a device into its back end and index, without trying the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.devices.choose import resolve
from anytorch.devices.ranking import parse, rank
from anytorch.devices.registry import by_torch_type, current_index, registry
from anytorch.devices.types import Backend
from anytorch.probe import snapshot

if TYPE_CHECKING:
    import torch


def locate(device: str | torch.device | None) -> tuple[Backend, int]:
    """The back end and index of "cuda:1", torch.device("npu", 0), "auto" or None (the configured device).

    It need not exist: see `require`. A name without a number means the best card that files show, as for `resolve`; a
    torch.device without one means the current card, as it does in torch.
    """
    known = registry()
    if device is not None and not isinstance(device, str):
        backend = by_torch_type(device.type)
        return backend, (current_index(backend) or 0) if device.index is None else device.index
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
