"""Our own files on disk: plain safetensors with a page-aligned header and checksums, in a folder that has an owner.

The folder is locked while its process lives. A process that was killed leaves its folder behind; the next start finds it
unlocked and removes it. A file is written beside its name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch import logs
from anytorch.errors import OutOfMemory, UsageError
from anytorch.memory.buffers import bytes_of, host_buffer
from anytorch.memory.images import dtype_name
from anytorch.memory.reader import PART, checksums_of, digits, open_direct
from anytorch.memory.sizes import ALIGNMENT, PAGE, round_up, words
from anytorch.native.sums import crc32, crc32_at
from anytorch.safetensors_files import CHECKSUMS, CODES, StoredTensor, header_bytes, read_header

if TYPE_CHECKING:
    import torch

fcntl: Any = None
with contextlib.suppress(ModuleNotFoundError):  # Windows: an open file cannot be removed there, which is a lock too
    import fcntl

log = logs.logger(__name__)
PREFIX = "anytorch-tiers-"
LOCK = "owner.lock"
PADDING = "__padding__."
BOUNCE = 8 * PART  # bytes per write
UNFINISHED_S = 3600.0  # a folder that never got its lock is removed after an hour


class Spill:
    """Write files to a folder of this process's own below `parent`. Close it, or leave it to the next start."""

    def __init__(self, parent: str | Path) -> None:
        self.parent = Path(parent)
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self.parent)
            token = f"{os.getpid()}-{secrets.token_hex(4)}"
            self._lock, self.folder = self._made(self.parent / f".{PREFIX}{token}", self.parent / f"{PREFIX}{token}")
        except OSError as exc:
            raise UsageError(
                f"cannot use {self.parent} as the disk level: it is not writable ({exc.strerror})",
                hint="name a folder you may write to",
            ) from exc
        self._bounce: torch.Tensor | None = None
        self._number = 0
        self._writing = threading.Lock()  # the bounce buffer serves one file at a time
        self._closed = False

    @staticmethod
    def _made(hidden: Path, folder: Path) -> tuple[int, Path]:
        """Make the folder and hold its lock. Raises OSError, leaving nothing."""
        lock = None
        hidden.mkdir()
        try:
            lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, hidden.rename(folder)  # seen by others only when it is locked
        except BaseException:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def write(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
        """Write one complete file; returns where each tensor lies. Raises OutOfMemory on a full disk, leaving nothing."""
        with self._writing:
            self._number += 1
            path = self.folder / f"{self._number:06d}.safetensors"
            self._write_whole(path, tensors)
        located, _ = read_header(path)
        return {name: located[name] for name in tensors}

    def _write_whole(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        partial = path.with_suffix(".partial")
        try:
            try:
                self._write(partial, tensors)
                partial.replace(path)
            except BaseException:
                with contextlib.suppress(
                    OSError
                ):  # what stays goes with the folder; the first failure is the one to tell
                    partial.unlink(missing_ok=True)
                raise
        except OSError as exc:
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfMemory(
                    f"the disk of {self.parent} is full: {words(nbytes)} could not be written",
                    hint="free space there or name another folder with disk=…",
                ) from exc
            raise UsageError(f"cannot write to {self.folder}: {exc.strerror}", hint="name another folder") from exc

    def _write(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        layout = file_layout(tensors)
        total = sum(nbytes for *_, nbytes in layout)
        bounce = self._bounce_for(total)
        # The checksums are in the header, so the bytes are gone through twice: once for them, once to write.
        if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values()):
            sums = _sums_in_place(layout, tensors)
        else:
            sums = tuple(value for part in _parts(layout, tensors, bounce) for value in checksums_of(part))
        header = header_bytes(layout, {CHECKSUMS: digits(sums)} if sums else None, align=PAGE)
        fd, _ = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, round_up(len(header) + total, PAGE))  # a full disk is found out here
            start = host_buffer(len(header))
            bytes_of(start)[:] = header
            write_all(fd, bytes_of(start), 0)
            at = len(header)
            for part in _parts(layout, tensors, bounce):
                padded = round_up(part.numel(), PAGE)
                write_all(fd, bytes_of(bounce[:padded]), at)
                at += part.numel()
            os.ftruncate(fd, len(header) + total)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _bounce_for(self, nbytes: int) -> torch.Tensor:
        """The buffer that a file's bytes are written through: as long as the file, at most BOUNCE."""
        wanted = min(BOUNCE, round_up(nbytes, PAGE))
        if self._bounce is None or self._bounce.numel() < wanted:
            self._bounce = host_buffer(wanted)
        return self._bounce

    def let_go(self) -> None:
        """Drop the buffer: nothing is going to be written for a while."""
        with self._writing:
            self._bounce = None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._bounce = None
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)


def _parts(
    layout: list[tuple[str, str, tuple[int, ...], int]], tensors: Mapping[str, torch.Tensor], bounce: torch.Tensor
) -> Iterator[torch.Tensor]:
    """The file's data in runs of at most BOUNCE bytes, each in the bounce buffer until the next is asked for."""
    import torch

    filled = 0
    for name, _, _, nbytes in layout:
        if name in tensors:
            flat = tensors[name].detach().contiguous().view(-1).view(torch.uint8)
        else:
            flat = torch.zeros(nbytes, dtype=torch.uint8)
        at = 0
        while at < nbytes:
            part = min(nbytes - at, BOUNCE - filled)
            bounce[filled : filled + part].copy_(flat[at : at + part])
            at, filled = at + part, filled + part
            if filled == BOUNCE:
                yield bounce
                filled = 0
    if filled:
        bounce[filled : round_up(filled, PAGE)].zero_()
        yield bounce[:filled]


def _sums_in_place(
    layout: list[tuple[str, str, tuple[int, ...], int]], tensors: Mapping[str, torch.Tensor]
) -> tuple[int, ...]:
    """The checksums of the file's MiBs from where the tensors lie, without copying them together first."""
    found: list[int] = []
    value = filled = 0
    for name, _, _, nbytes in layout:
        at = 0
        while at < nbytes:
            part = min(nbytes - at, PART - filled)
            tensor = tensors.get(name)
            value = crc32(bytes(part), value) if tensor is None else crc32_at(tensor.data_ptr() + at, part, value)
            at, filled = at + part, filled + part
            if filled == PART:
                found.append(value)
                value = filled = 0
    return (*found, value) if filled else tuple(found)


def file_layout(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, shape and bytes in file order, with padding in between: safetensors allows no holes."""
    layout: list[tuple[str, str, tuple[int, ...], int]] = []
    end = 0
    for name, tensor in tensors.items():
        gap = -end % ALIGNMENT
        if gap:
            layout.append((f"{PADDING}{len(layout)}", "U8", (gap,), gap))
        layout.append((name, CODES[dtype_name(tensor.dtype)], tuple(tensor.shape), tensor.nbytes))
        end += gap + tensor.nbytes
    return layout


def write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def remove_stale(parent: Path) -> list[Path]:
    """Remove the folders below `parent` whose owners are gone; returns them."""
    removed = []
    for folder in [*parent.glob(f"{PREFIX}*"), *parent.glob(f".{PREFIX}*")]:
        if folder.is_dir() and is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed %s, left behind by a process that has ended", folder)
            removed.append(folder)
    return removed


def is_stale(folder: Path) -> bool:
    if folder.name.startswith("."):
        try:
            return time.time() - folder.stat().st_mtime > UNFINISHED_S
        except OSError:
            return False
    try:
        fd = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True  # its owner was removing it
    except OSError:
        return False  # somebody else's
    try:
        if fcntl is None:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
