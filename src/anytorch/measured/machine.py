"""Which machine a measurement holds for: a key that changes when the CPU, the cards, a driver or torch does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware


def drivers(hardware: Hardware) -> dict[str, str]:
    """Driver versions by vendor, and the kernel drivers of cards whose vendor tells no version."""
    found = {
        "nvidia": hardware.nvidia.driver or hardware.nvidia.kernel_version,
        "ascend": hardware.ascend.driver,
    }
    versions = {vendor: version for vendor, version in found.items() if version}
    for gpu in hardware.gpus:
        if gpu.driver and gpu.vendor not in versions:
            versions[gpu.vendor] = gpu.driver
    return versions


def identity(hardware: Hardware | None = None) -> dict[str, Any]:
    """The facts behind the key, without None: they are stored in TOML."""
    hardware = snapshot() if hardware is None else hardware
    cpu = hardware.cpu
    cards = sorted(gpu.uuid or f"{gpu.vendor} {gpu.name or '?'} {gpu.pci or '?'}" for gpu in hardware.gpus)
    return {
        "cpu": cpu.model or hardware.machine.arch,
        "cores": [cpu.logical, cpu.physical or 0, cpu.usable],
        "gpus": cards,
        "driver": drivers(hardware),
        "torch": hardware.torch.version if hardware.torch else "none",
    }


def key_of(facts: Mapping[str, Any]) -> str:
    import hashlib
    import json

    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def machine_key(hardware: Hardware | None = None) -> str:
    """Sixteen hex digits over CPU model, core counts, cards' UUIDs, drivers and torch version."""
    return key_of(identity(hardware))


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In words: "torch was 2.12.0, is 2.13.0"."""
    different = [name for name in now if before.get(name) != now[name]]
    return (
        "; ".join(f"{name} was {before.get(name, 'unknown')}, is {now[name]}" for name in different)
        or "the key differs"
    )
