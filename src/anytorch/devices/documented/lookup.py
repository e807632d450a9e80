"""Find a device by name: usable, or with the reason why not, without a warning or an error about that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytorch.devices.choose import as_usable, configured_request, survey, why_not
from anytorch.devices.protocol import Backend
from anytorch.devices.ranking import parse, pick, reasons_for
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate, MemoryUse, Reason, State
from anytorch.errors import DeviceIndexError
from anytorch.probe.facts import Hardware

if TYPE_CHECKING:
    import torch

GIGABYTE = 2**30  # as the command line and `explain` count


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


def find_quietly(device: str | torch.device) -> Found:
    """As `find`, for yes-or-no questions: an index that does not exist is one more reason."""
    try:
        return find(device)
    except DeviceIndexError as exc:
        return Found(str(device), None, exc.message)


def usable_devices(wanted: str | None = None) -> list[Candidate]:
    """Every usable device, best first. Empty where torch is missing or does not import.

    A software adapter is tried, and listed for sure, only if its back end is the `wanted` one.
    """
    found = survey("needed", wanted=wanted)
    if found.facts.hardware.torch is None:
        return []
    return [candidate for candidate in found.devices if candidate.state is State.USABLE]


def hardware() -> Hardware:
    """The machine as the probes see it."""
    return survey("never").facts.hardware


def usable_of(name: str) -> list[Candidate]:
    """The usable devices of a back end. "cuda" means ROCm's where those are what torch calls "cuda"."""
    devices = usable_devices(name)
    return [device for device in devices if device.backend == name] or [
        device for device in devices if device.torch_type == name
    ]


def backend_of(candidate: Candidate) -> Backend:
    return registry().get(candidate.backend)


def gigabytes_of(use: MemoryUse) -> dict[str, Any]:
    """Memory figures in GiB under the documented keys (`…_gb`); None where unknown."""
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
