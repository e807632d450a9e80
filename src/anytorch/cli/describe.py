"""Devices, reasons and cards as the JSON documents and tables of several commands show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.cli.output import Output, gigabytes
from anytorch.devices.types import Candidate, Level, Reason, State
from anytorch.probe.facts import Gpu, as_json

MARKS = {State.USABLE: "usable", State.SEEN: "seen, not tried", State.UNUSABLE: "unusable"}


def reason_json(reason: Reason) -> dict[str, Any]:
    return {
        "code": reason.code,
        "level": reason.level.value,
        "text": reason.text,
        "fix": reason.fix,
        "evidence": reason.evidence,
        "backends": list(reason.backends),
    }


def device_json(device: Candidate) -> dict[str, Any]:
    return {
        "id": device.id,
        "backend": device.backend,
        "torch": device.torch_name,
        "index": device.index,
        "name": device.name,
        "state": device.state.value,
        "uuid": device.uuid,
        "pci": device.pci,
        "physical_index": device.physical_index,
        "total": device.total,
        "free": device.free,
        "integrated": device.integrated,
        "software": device.software,
        "display": device.display,
        "caps": as_json(device.caps),
        "facts": as_json(device.facts),
        "reasons": [reason_json(reason) for reason in device.reasons],
    }


def first_reason(device: Candidate) -> Reason | None:
    """What a person should read first: an error before a warning; notes explain nothing that is missing."""
    serious = [reason for reason in device.reasons if reason.level is not Level.NOTE]
    return min(serious, key=lambda reason: reason.level is not Level.ERROR, default=None)


def device_table(output: Output, devices: Sequence[Candidate], *, title: str = "") -> None:
    """Each device on a line, then for those with a reason the reason and its fix."""
    rows = [
        (
            device.id,
            device.name + (" (software)" if device.software else ""),
            MARKS[device.state],
            gigabytes(device.total),
            gigabytes(device.free),
        )
        for device in devices
    ]
    output.table(("device", "name", "state", "memory (total)", "memory (free)"), rows, title=title)
    told: set[str] = set()
    for device in devices:
        reason = first_reason(device)
        if reason is not None and reason.text not in told:
            told.add(reason.text)
            output.text(f"  {device.id}: {reason.text} [{reason.code}]")
            if reason.fix:
                output.text(f"    fix: {reason.fix}")


def gpu_words(gpu: Gpu) -> str:
    """One line about a card: "NVIDIA H200, 0000:01:00.0, 139.8 GiB, compute capability 9.0"."""
    device = f"{gpu.device_id:04x}" if gpu.device_id is not None else ""
    parts = [
        gpu.name or f"{gpu.vendor} GPU {device}".rstrip(),
        gpu.pci or "",
        gigabytes(gpu.total),
        f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else "",
        gpu.arch or "",
        "integrated" if gpu.integrated else "",
        "drives the display" if gpu.display else "",
        f"driver {gpu.driver}" if gpu.driver else "no kernel driver bound",
    ]
    return ", ".join(part for part in parts if part)
