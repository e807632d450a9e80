"""Devices, reasons and cards as the JSON documents and tables of several commands show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anytorch import settings
from anytorch.cli.output import Output, gigabytes
from anytorch.devices.ranking import parse, pick, reasons_for
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate, Level, Reason, State
from anytorch.errors import DeviceIndexError
from anytorch.probe.facts import as_json

SAME_NAMES = (
    *(
        "backend",
        "index",
        "name",
        "uuid",
        "pci",
        "physical_index",
        "total",
        "free",
        "integrated",
        "software",
        "display",
    ),
    *("caps", "facts", "reasons"),
)


def device_json(device: Candidate) -> dict[str, Any]:
    own = {"id": device.id, "torch": device.torch_name, "state": device.state.value}
    return {**own, **{name: as_json(getattr(device, name)) for name in SAME_NAMES}}


def devices_shown(output: Output, devices: Sequence[Mapping[str, Any]]) -> None:
    """A table of `device_json` documents; under it, for each device that has one, the first reason and its fix."""
    rows = [
        (
            device["id"],
            device["name"] + (" (software)" if device["software"] and "software" not in device["name"] else ""),
            device["state"],
            gigabytes(device["total"]),
            gigabytes(device["free"]),
        )
        for device in devices
    ]
    output.table(("device", "name", "state", "memory (total)", "memory (free)"), rows)
    told: set[str] = set()
    for device in devices:
        # Errors come first in a device's reasons; notes explain nothing that is missing.
        reason = next((r for r in device["reasons"] if r["level"] != Level.NOTE.value and r["text"] not in told), None)
        if reason is not None:
            told.add(reason["text"])
            reason_shown(output, reason, device["id"])
        if about := (device["facts"] or {}).get("matrix cores"):
            output.text(f"  {device['id']}: matrix cores are {about}")


def reason_shown(output: Output, reason: Mapping[str, Any], about: str) -> None:
    output.text(f"  {about}: {reason['text']} [{reason['code']}]")
    if reason["fix"]:
        output.text(f"    fix: {reason['fix']}")


def would_use(devices: Sequence[Candidate], reasons: Sequence[Reason]) -> tuple[str | None, str]:
    """The id of the device `resolve()` would choose among these and, if it is not the configured one, why.

    (None, why) where it would raise: nothing is usable, the index does not exist, or the setting `strict` forbids
    falling back.
    """
    text, origin = "auto", ""
    if settings.lookup("backend").source != "default":
        from anytorch.devices.choose import configured_request  # 3 ms that most calls of `info` need not pay

        text, origin = configured_request()
    request = parse(text, registry())
    try:
        chosen = pick(request, devices)
    except DeviceIndexError as exc:
        return None, exc.message
    if chosen is not None:
        return chosen.id, ""
    if not origin:
        return None, ""
    from anytorch.devices.choose import why_not

    why = f"{text} (from {origin}) cannot be used: {why_not(request, devices, reasons_for(request, devices, reasons))}"
    cpu = next((device.id for device in devices if device.backend == "cpu" and device.state is State.USABLE), None)
    return (None if settings.get("strict") else cpu), why


def gpu_words(gpu: Mapping[str, Any]) -> str:
    """One line about a card of `info`'s document: "NVIDIA H200, 0000:01:00.0, 139.8 GiB, compute capability 9.0"."""
    number = f"{gpu['device_id']:04x}" if gpu["device_id"] is not None else ""
    parts = [
        gpu["name"] or f"{gpu['vendor']} GPU {number}".rstrip(),
        gpu["pci"],
        gigabytes(gpu["total"]),
        f"compute capability {gpu['capability'][0]}.{gpu['capability'][1]}" if gpu["capability"] else "",
        gpu["arch"],
        "integrated" if gpu["integrated"] else "",
        "drives the display" if gpu["display"] else "",
        f"driver {gpu['driver']}" if gpu["driver"] else "",
    ]
    return ", ".join(part for part in parts if part)
