"""How fast the levels are: short measurements, cached until the device, the disk or torch changes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from anytorch import logs
from anytorch.cache import Store
from anytorch.errors import AnytorchError, CacheError
from anytorch.memory.buffers import host_buffer
from anytorch.memory.images import Piece, from_files
from anytorch.memory.reader import Reader
from anytorch.memory.spill import Spill
from anytorch.memory.streams import Copies

log = logs.logger(__name__)
MIB = 2**20
DISK_NBYTES = 128 * MIB
LINK_NBYTES = 128 * MIB
REPEATS = 3
CACHE = "tiers"


def link_speed(device: torch.device, *, refresh: bool = False) -> float | None:
    """GB/s from (pinned) host memory to a device, by copies on the copy stream; a memcpy's rate for the CPU itself."""
    key = f"link {device} {device_name(device)} torch {torch.__version__}"
    found = _cached(key, refresh, lambda: [_link(device)])
    return found[0] if found else None


def disk_speed(folder: Path, *, refresh: bool = False) -> tuple[float | None, float | None]:
    """GB/s of direct reads from and writes to the file system of a folder, with a file of 128 MiB."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        key = f"disk {os.stat(existing).st_dev} {os.uname().nodename if hasattr(os, 'uname') else ''}"  # noqa: PTH116
        found = _cached(key, refresh, lambda: list(_disk(folder)))
    except (OSError, AnytorchError) as exc:
        log.warning("the disk of %s could not be measured: %s", folder, exc)
        return None, None
    return (found[0], found[1]) if found else (None, None)


def file_speed(path: Path, *, refresh: bool = False) -> float | None:
    """GB/s of direct reads of a file that is there already, by its first 128 MiB: nothing is written beside a checkpoint."""
    try:
        key = f"file {path.stat().st_dev} {os.uname().nodename if hasattr(os, 'uname') else ''}"
        found = _cached(key, refresh, lambda: [_file(path)])
    except (OSError, AnytorchError) as exc:
        log.warning("reading %s could not be measured: %s", path, exc)
        return None
    return found[0] if found else None


def _file(path: Path) -> float:
    nbytes = min(DISK_NBYTES, path.stat().st_size // MIB * MIB)
    buffer = host_buffer(nbytes)
    reader = Reader(verify=False)
    try:
        rates = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            reader.read([Piece(str(path), 0, nbytes, 0)], buffer)
            rates.append(nbytes / (time.perf_counter() - begin) / 1e9)
        return statistics.median(rates)
    finally:
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


def _disk(folder: Path) -> tuple[float, float]:
    spill = Spill(folder)
    reader = Reader(verify=False)
    try:
        data = host_buffer(DISK_NBYTES)
        data.view(torch.int64).copy_(torch.arange(DISK_NBYTES // 8))  # not zeros: some disks are too clever about those
        begin = time.perf_counter()
        located = spill.write({"measure": data})
        write = DISK_NBYTES / (time.perf_counter() - begin) / 1e9
        image = from_files("measure", located.values(), in_place=True)
        rates = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            reader.read(image.pieces, data[: image.nbytes])
            rates.append(DISK_NBYTES / (time.perf_counter() - begin) / 1e9)
        return statistics.median(rates), write
    finally:
        reader.close()
        spill.close()
