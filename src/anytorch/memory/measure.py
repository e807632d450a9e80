"""How fast the levels are: short measurements, cached until the device, the disk or torch changes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from anytorch import logs
from anytorch.cache import Store
from anytorch.errors import AnytorchError, CacheError
from anytorch.memory.buffers import host_buffer
from anytorch.memory.images import Piece, from_files
from anytorch.memory.reader import Reader
from anytorch.memory.spill import Spill
from anytorch.memory.transfers import Copies

log = logs.logger(__name__)
MIB = 2**20
DISK_NBYTES = 128 * MIB
LINK_NBYTES = 128 * MIB
REPEATS = 3
CLEARLY = 1.2
CACHE = "tiers"


def link_speed(device: torch.device, *, refresh: bool = False) -> float | None:
    """GB/s from (pinned) host memory to a device, by copies on the copy stream; a memcpy's rate for the CPU itself."""
    key = f"link {device} {device_name(device)} torch {torch.__version__}"
    found = _cached(key, refresh, lambda: [_link(device)])
    return found[0] if found else None


@dataclass(frozen=True)
class DiskSpeed:
    """GB/s of a file system, None where it could not be measured, and which way of reading reached it."""

    read_gb_per_s: float | None = None
    write_gb_per_s: float | None = None
    direct: bool = True  # past the page cache, or through it


def disk_speed(folder: Path, *, refresh: bool = False) -> DiskSpeed:
    """How fast a folder's file system is read (directly or through the page cache) and written, by a file of 128 MiB."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        found = _cached(_disk_key("disk", existing), refresh, lambda: _disk(folder))
    except (OSError, AnytorchError) as exc:
        log.warning("the disk of %s could not be measured: %s", folder, exc)
        return DiskSpeed()
    return _chosen(*found) if found and len(found) == 3 else DiskSpeed()


def file_speed(path: Path, *, refresh: bool = False) -> DiskSpeed:
    """The same for reading a file that is there already, by its first 128 MiB: nothing is written beside a checkpoint."""
    try:
        found = _cached(_disk_key("file", path), refresh, lambda: _file(path))
    except (OSError, AnytorchError) as exc:
        log.warning("reading %s could not be measured: %s", path, exc)
        return DiskSpeed()
    return _chosen(found[0], None, found[1]) if found and len(found) == 2 else DiskSpeed()


def _disk_key(kind: str, path: Path) -> str:
    """2: reads into huge pages."""
    return f"{kind} 2 {path.stat().st_dev} {os.uname().nodename if hasattr(os, 'uname') else ''}"


def _chosen(direct: float, write: float | None, buffered: float) -> DiskSpeed:
    """Direct reads cost no second copy and leave the page cache alone: the other way has to be clearly faster."""
    if buffered > CLEARLY * direct:
        return DiskSpeed(buffered, write, direct=False)
    return DiskSpeed(direct, write)


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


def _cached(key: str, refresh: bool, measure: Callable[[], list[float]]) -> list[float] | None:
    store = Store(CACHE)
    try:
        known = None if refresh else store.get(key)
    except CacheError as exc:
        log.warning("%s", exc.message)
        return measure()
    if isinstance(known, list) and all(isinstance(value, (int, float)) for value in known):
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
