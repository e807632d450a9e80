"""Merges what was seen, what was tried and what the doctor says into one list of devices. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from anytorch.devices.protocol import Backend
from anytorch.devices.types import (
    SOFTWARE_PRIORITY,
    BackendReport,
    Candidate,
    DeviceReport,
    Facts,
    Level,
    Reason,
    State,
)


def candidates(facts: Facts, backends: Iterable[Backend], reasons: Sequence[Reason]) -> list[Candidate]:
    """Every device anybody could mean, best back end first. Unusable ones are listed with their reasons."""
    found: list[Candidate] = []
    for backend in backends:
        about = tuple(reason for reason in reasons if backend.name in reason.backends)
        seen = list(backend.seen(facts.hardware))
        report = facts.torch.backends.get(backend.name) if facts.torch is not None else None
        if report is None:
            found += [_not_tried(candidate, about, facts) for candidate in seen]
        else:
            found += _tried(backend, seen, report, about)
    return found


def _not_tried(candidate: Candidate, about: tuple[Reason, ...], facts: Facts) -> Candidate:
    blocked = any(reason.level is Level.ERROR for reason in about)
    tried_something = facts.torch is not None and bool(facts.torch.import_error)
    return replace(candidate, reasons=about, state=State.UNUSABLE if blocked or tried_something else State.SEEN)


def _tried(
    backend: Backend, seen: list[Candidate], report: BackendReport, about: tuple[Reason, ...]
) -> list[Candidate]:
    result = []
    left = list(seen)
    for device in report.devices:
        match = _match(device, left)
        if match is not None:
            left.remove(match)
        result.append(_usable(backend, device, match, about))
    broken = report.facts.get("broken") or {}
    taken = {candidate.index for candidate in result}
    for candidate in left:
        # A card the probes saw and the child could not use. Its own index may be taken by a usable one under a mask.
        if candidate.index in taken:
            continue
        error = str(broken.get(str(candidate.index)) or report.error or "torch does not list this device")
        result.append(replace(candidate, state=State.UNUSABLE, reasons=about or (_told(backend, report, error),)))
    return result


def _usable(backend: Backend, device: DeviceReport, match: Candidate | None, about: tuple[Reason, ...]) -> Candidate:
    software = device.software or (match.software if match else False)
    base = match or Candidate(
        backend.name, backend.torch_type, device.index, device.name, State.USABLE, priority=backend.priority
    )
    return replace(
        base,
        index=device.index,
        name=device.name,
        state=State.USABLE,
        uuid=device.uuid or base.uuid,
        pci=device.pci or base.pci,
        total=device.total if device.total is not None else base.total,
        # The probes look now; the child's figure may come from the cache and be days old.
        free=base.free if base.free is not None else device.free,
        integrated=device.integrated if device.integrated is not None else base.integrated,
        software=software,
        priority=SOFTWARE_PRIORITY if software else base.priority,
        caps=device.caps or base.caps,
        in_use=bool(device.facts.get("in_use")),
        reasons=about,
        facts={**base.facts, **device.facts},
    )


def _match(device: DeviceReport, seen: Sequence[Candidate]) -> Candidate | None:
    """The same card among those seen: by UUID, then PCI address, then index."""
    for candidate in seen:
        if device.uuid and device.uuid == candidate.uuid:
            return candidate
    for candidate in seen:
        if device.pci and candidate.pci and device.pci.lower() == candidate.pci.lower():
            return candidate
    for candidate in seen:
        same_kind = device.software == candidate.software
        if candidate.index == device.index and same_kind and not (device.uuid and candidate.uuid):
            return candidate
    return None


def _told(backend: Backend, report: BackendReport, error: str) -> Reason:
    """The child's own words, when no diagnosis explains them."""
    return Reason(
        code=report.code or "device-failed",
        level=Level.ERROR,
        text=f"{backend.title}: {error}",
        fix="anytorch doctor",
        evidence="tried in a child process",
        backends=(backend.name,),
    )
