"""The levels of this machine: how much each holds and how fast it is. Measured once, cached; every number can be given."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anytorch import logs, settings
from anytorch.cache import Store
from anytorch.devices.choose import resolve
from anytorch.devices.locate import require
from anytorch.devices.memory import memory
from anytorch.devices.precision import capabilities
from anytorch.errors import AnytorchError, CacheError, UsageError
from anytorch.memory.buffers import host_buffer
from anytorch.memory.images import Piece, from_files
from anytorch.memory.reader import Reader
from anytorch.memory.sizes import parse_nbytes
from anytorch.memory.spill import Spill
from anytorch.memory.transfers import Copies
from anytorch.memory.types import Level, Speeds, Tiers

log = logs.logger(__name__)
Size = int | float | str
MIB = 2**20
LARGE = 64 * MIB  # bytes of a file that says something about its disk
# Of what is free: activations, other programs and the allocator's own rounding need the rest.
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.85, 0.7, 0.9
DISK_NBYTES = LINK_NBYTES = 128 * MIB  # that are moved to measure a speed
REPEATS = 3
COPIES = 4  # inside a device for one measurement: a single one is short beside the wait for it
CLEARLY = 1.2
CACHE = "tiers"


def create_tiers(
    device: str | torch.device | None = "auto",
    *,
    device_budget: Size | None = None,
    host_budget: Size | None = None,
    disk: str | Path | bool | None = None,
    disk_budget: Size | None = None,
    speeds: Speeds | None = None,
    measure: bool = True,
    device_bandwidth: bool = False,
) -> Tiers:
    """Return the levels of memory from a device down, with budgets and speeds.

    Budgets that are not given come from what is free now (of the control group, where there is one). `disk` is a folder,
    None for one in the cache folder, False for no disk level. A device that computes in the host's RAM has two levels, RAM
    and disk, unless both budgets are given. `speeds` replaces the measurement; `measure=False` leaves speeds unknown.
    `device_bandwidth`: measure how fast the device reads and writes its own memory, too; no plan needs it.
    """
    chosen = device if device is not None and not isinstance(device, str) else resolve(device).device
    backend, index = require(chosen)
    caps = capabilities(backend.name, index)
    shared = caps.unified_memory and (device_budget is None or host_budget is None)
    folder = None if disk is False else Path(settings.cache_folder() / "tiers" if disk in (None, True) else str(disk))
    levels: list[Level] = []
    given = host_budget if shared and device_budget is None else device_budget
    capacity, source = _budget(given, "device_budget", memory(chosen).free, DEVICE_SHARE)
    own = device_speed(chosen) if device_bandwidth else None
    levels.append(Level(0, "device", str(chosen), capacity, own, source=source))
    if not shared:
        capacity, source = _budget(host_budget, "host_budget", memory("cpu").free, HOST_SHARE)
        rate = speeds.host_gb_per_s if speeds else link_speed(chosen) if measure else None
        levels.append(Level(1, "host", "cpu", capacity, rate, pinned=not caps.unified_memory, source=source))
    if folder is not None:
        levels.append(_disk_level(folder, disk_budget, speeds, measure))
    return Tiers(tuple(levels), shared)


def _disk_level(folder: Path, budget: Size | None, speeds: Speeds | None, measure: bool) -> Level:
    capacity, source = _budget(budget, "disk_budget", shutil.disk_usage(_existing(folder)).free, DISK_SHARE)
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


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


# --- how fast they are: short measurements, cached until the device, the disk or torch changes -------------------------


def link_speed(device: torch.device, *, refresh: bool = False) -> float:
    """GB/s from (pinned) host memory to a device, by copies on the copy stream; a memcpy's rate for the CPU itself."""
    key = f"link {device} {device_name(device)} torch {torch.__version__}"
    return _cached(key, refresh, lambda: [_link(device)])[0]


def device_speed(device: torch.device, *, refresh: bool = False) -> float:
    """GB/s at which a device reads and writes its own memory: a copy inside it, bytes read and bytes written counted."""
    key = f"memory {device} {device_name(device)} torch {torch.__version__}"
    return _cached(key, refresh, lambda: [_device(device)])[0]


@dataclass(frozen=True)
class DiskSpeed:
    """GB/s of a file system, None where it could not be measured, and which way of reading reached it."""

    read_gb_per_s: float | None = None
    write_gb_per_s: float | None = None
    direct: bool = True  # past the page cache, or through it


def disk_speed(folder: Path, *, refresh: bool = False) -> DiskSpeed:
    """How fast a folder's file system is read (directly or through the page cache) and written, by a file of 128 MiB."""
    return _disk_speed("disk", _existing(folder), refresh, lambda: _disk(folder))


def file_speed(path: Path, *, refresh: bool = False) -> DiskSpeed:
    """The same for reading a file that is there already, by its first 128 MiB: nothing is written beside a checkpoint."""
    return _disk_speed("file", path, refresh, lambda: _file(path))


def _disk_speed(kind: str, path: Path, refresh: bool, measure: Callable[[], list[float]]) -> DiskSpeed:
    """What `measure` finds for direct and for buffered reads, and for writes if it writes; cached by the path's disk."""
    try:
        # 2: reads into huge pages.
        key = f"{kind} 2 {path.stat().st_dev} {os.uname().nodename if hasattr(os, 'uname') else ''}"
        direct, *write, buffered = _cached(key, refresh, measure)
    except (OSError, ValueError, AnytorchError) as exc:
        log.warning("how fast %s is read could not be measured: %s", path, exc)
        return DiskSpeed()
    # Direct reads cost no second copy and leave the page cache alone: the other way has to be clearly faster.
    through_cache = buffered > CLEARLY * direct
    return DiskSpeed(buffered if through_cache else direct, write[0] if write else None, direct=not through_cache)


def _file(path: Path) -> list[float]:
    nbytes = min(DISK_NBYTES, path.stat().st_size // MIB * MIB)
    return read_rates([Piece(str(path), 0, nbytes, 0)], host_buffer(nbytes))


def read_rates(pieces: Sequence[Piece], buffer: torch.Tensor) -> list[float]:
    """GB/s of reading these pieces directly, and through a page cache that has nothing of them; taken in turns."""
    readers = [Reader(verify=False, direct=direct) for direct in (True, False)]
    rates: tuple[list[float], list[float]] = ([], [])
    nbytes = sum(piece.nbytes for piece in pieces)
    try:
        for _ in range(REPEATS):
            for reader, found in zip(readers, rates, strict=True):
                for piece in pieces:
                    reader.file(piece.path, direct=False).drop_cache()
                begin = time.perf_counter()
                reader.read(pieces, buffer)
                found.append(nbytes / (time.perf_counter() - begin) / 1e9)
        return [statistics.median(found) for found in rates]
    finally:
        for reader in readers:
            reader.close()


def device_name(device: torch.device) -> str:
    module = getattr(torch, device.type, None)
    name = getattr(module, "get_device_name", None)
    return str(name(device)) if callable(name) and device.type != "cpu" else device.type


def _cached(key: str, refresh: bool, measure: Callable[[], list[float]]) -> list[float]:
    store = Store(CACHE)
    try:
        known = None if refresh else store.get(key)
    except CacheError as exc:
        log.warning("%s", exc.message)
        return measure()
    if isinstance(known, list) and known and all(isinstance(value, (int, float)) for value in known):
        return [float(value) for value in known]
    found = measure()
    try:
        store.put(key, found)
    except CacheError as exc:
        log.warning("%s", exc.message)
    return found


def _link(device: torch.device) -> float:
    source = host_buffer(LINK_NBYTES, pinned=device.type != "cpu")
    target = torch.zeros(LINK_NBYTES, dtype=torch.uint8, device=device)
    copies = Copies(device)

    def once() -> float:
        begin = time.perf_counter()
        with copies.use():
            target.copy_(source, non_blocking=True)
        copies.synchronize()
        if not copies.asynchronous and device.type != "cpu":
            target[:1].cpu()  # waits for the copy on a device without streams
        return LINK_NBYTES / (time.perf_counter() - begin) / 1e9

    once()
    return statistics.median(once() for _ in range(REPEATS))


def _device(device: torch.device) -> float:
    source = torch.ones(LINK_NBYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        if device.type != "cpu":
            target[:1].cpu()  # waits for the copies, on every device
        return 2 * COPIES * LINK_NBYTES / (time.perf_counter() - begin) / 1e9

    once()
    return statistics.median(once() for _ in range(REPEATS))


def _disk(folder: Path) -> list[float]:
    spill = Spill(folder)
    try:
        data = host_buffer(DISK_NBYTES)
        data.view(torch.int64).copy_(torch.arange(DISK_NBYTES // 8))  # not zeros: some disks are too clever about those
        begin = time.perf_counter()
        located = spill.write({"measure": data})
        write = DISK_NBYTES / (time.perf_counter() - begin) / 1e9
        image = from_files("measure", located.values(), in_place=True)
        direct, buffered = read_rates(image.pieces, data[: image.nbytes])
        return [direct, write, buffered]
    finally:
        spill.close()
