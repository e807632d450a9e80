"""Find a device by name, usable or with the reason why not; and the facts of the one in use.

Nothing here warns about a device that is missing, and nothing wakes a driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytorch.devices.choose import as_usable, configured_request, survey, why_not
from anytorch.devices.ranking import parse, pick, reasons_for
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate, Reason, State

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Found:
    """The result of looking up a name. `device` is None if no usable one has it; `why` and `reasons` then say why."""

    text: str
    device: Candidate | None
    why: str = ""
    reasons: tuple[Reason, ...] = ()


def find(device: str | torch.device | None = None) -> Found:
    """The usable device a name means; None is the configured device. Raises UnknownDevice and DeviceIndexError."""
    text = configured_request()[0] if device is None else str(device)
    wanted = parse(text, registry())
    asks_for_cpu = wanted.backend == "cpu"
    found = survey("never" if asks_for_cpu else "needed", wanted=wanted.backend)
    if found.facts.hardware.torch is None:
        return Found(text, None, "torch is not installed")
    listed = [as_usable(c) if asks_for_cpu and c.backend == "cpu" else c for c in found.devices]
    chosen = pick(wanted, listed)
    if chosen is not None:
        return Found(text, chosen)
    reasons = tuple(reasons_for(wanted, listed, found.reasons))
    return Found(text, None, why_not(wanted, listed, reasons), reasons)


def usable_devices(wanted: str | None = None) -> list[Candidate]:
    """Every usable device, best first. Empty where torch is missing or does not import.

    A software adapter is tried, and listed for sure, only if its back end is the `wanted` one.
    """
    found = survey("needed", wanted=wanted)
    if found.facts.hardware.torch is None:
        return []
    return [candidate for candidate in found.devices if candidate.state is State.USABLE]


def device_info() -> dict[str, Any]:
    """The device in use and the torch that drives it, as a dictionary for JSON: what `POST /api/load-model` answers with.

    `device_*` describe the configured device, or the best one; `device_count` is the number of that type, so 1 on a machine
    with only a CPU.
    """
    devices = usable_devices()
    found = find()
    chosen = found.device or next((device for device in devices if device.backend == "cpu"), None)
    machine = survey("never").facts.hardware
    wheel = machine.torch
    return {
        "cuda_available": any(device.torch_type == "cuda" for device in devices),
        "npu_available": any(device.torch_type == "npu" for device in devices),
        "device_count": sum(device.torch_type == chosen.torch_type for device in devices) if chosen else 0,
        "device_name": chosen.name if chosen else "none",
        "device_type": chosen.torch_type if chosen else "none",
        "cuda_version": wheel.cuda if wheel else None,
        "npu_version": machine.packages.versions.get("torch-npu"),
        "backend": chosen.backend if chosen else None,
        "hip_version": wheel.hip if wheel else None,
        "xpu_version": wheel.xpu if wheel else None,
        "torch_version": wheel.version if wheel else None,
        "devices": [device.id for device in devices],
        "reason": found.why,  # why the configured device is not the one in use; "" when it is
    }
