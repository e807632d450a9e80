"""The levels of this machine: how much each holds and how fast it is. Measured once, cached; every number can be given."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from anytorch import logs, settings
from anytorch.devices.choose import resolve
from anytorch.devices.locate import require
from anytorch.devices.memory import memory
from anytorch.devices.precision import capabilities
from anytorch.errors import UsageError
from anytorch.memory.measure import DiskSpeed, disk_speed, file_speed, link_speed
from anytorch.memory.sizes import parse_nbytes
from anytorch.memory.types import Level, Speeds, Tiers

if TYPE_CHECKING:
    import torch

log = logs.logger(__name__)
Size = int | float | str
LARGE = 64 * 2**20  # bytes of a file that says something about its disk
# Of what is free: activations, other programs and the allocator's own rounding need the rest.
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.85, 0.7, 0.9


def create_tiers(
    device: str | torch.device | None = "auto",
    *,
    device_budget: Size | None = None,
    host_budget: Size | None = None,
    disk: str | Path | bool | None = None,
    disk_budget: Size | None = None,
    speeds: Speeds | None = None,
    measure: bool = True,
) -> Tiers:
    """The levels below and including a device.

    Budgets that are not given come from what is free now (of the control group, where there is one). `disk` is a folder,
    None for one in the cache folder, False for no disk level. A device that computes in the host's RAM has two levels, RAM
    and disk, unless both budgets are given. `speeds` replaces the measurement; `measure=False` leaves speeds unknown.
    """
    chosen = device if device is not None and not isinstance(device, str) else resolve(device).device
    backend, index = require(chosen)
    caps = capabilities(backend.name, index)
    shared = caps.unified_memory and (device_budget is None or host_budget is None)
    place = str(chosen)
    folder = None if disk is False else Path(settings.cache_folder() / "tiers" if disk in (None, True) else str(disk))
    levels: list[Level] = []
    if shared:
        given = device_budget if device_budget is not None else host_budget
        capacity, source = _budget(given, "device_budget", memory(chosen).free, DEVICE_SHARE if given is None else 1.0)
        levels.append(Level(0, "device", place, capacity, source=source))
    else:
        capacity, source = _budget(device_budget, "device_budget", memory(chosen).free, DEVICE_SHARE)
        levels.append(Level(0, "device", place, capacity, source=source))
        capacity, source = _budget(host_budget, "host_budget", memory("cpu").free, HOST_SHARE)
        rate = speeds.host_gb_per_s if speeds else link_speed(chosen) if measure else None
        levels.append(Level(1, "host", "cpu", capacity, rate, pinned=not caps.unified_memory, source=source))
    if folder is not None:
        levels.append(_disk_level(folder, disk_budget, speeds, measure))
    return Tiers(tuple(levels), shared)


def _disk_level(folder: Path, budget: Size | None, speeds: Speeds | None, measure: bool) -> Level:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    capacity, source = _budget(budget, "disk_budget", shutil.disk_usage(existing).free, DISK_SHARE)
    found = DiskSpeed()
    if speeds is not None:
        found = DiskSpeed(speeds.disk_gb_per_s)
    elif measure:
        large = [path for path in sorted(folder.glob("*.safetensors")) if path.stat().st_size >= LARGE]
        if large:  # a checkpoint's folder, where nothing is to be written
            found = file_speed(large[0])
        elif not any(folder.glob("*.safetensors")):
            found = disk_speed(folder)
    return Level(
        2, "disk", str(folder), capacity, found.read_gb_per_s, found.write_gb_per_s, source=source, direct=found.direct
    )


def _budget(given: Size | None, what: str, free: int | None, share: float) -> tuple[int, str]:
    if given is not None:
        return parse_nbytes(given, what), "given"
    if free is None:
        raise UsageError(f"the free memory for {what} is unknown", hint=f'give it: {what}="8GB"')
    return int(free * share), f"{share:.0%} of what is free"


def speeds_of(tiers: Tiers) -> Speeds:
    host, disk = tiers.find("host"), tiers.find("disk")
    return Speeds(host.read_gb_per_s if host else None, disk.read_gb_per_s if disk else None)
