"""Shared memory for token ids sent to a worker and vectors sent back. Nothing is pickled.

A block is a file in a folder of the pool's own, mapped by both sides: in /dev/shm, which is memory, where that has room,
else in the temporary folder. Not `multiprocessing.shared_memory`: its tracker unlinks a block when any process that has
attached it ends, which is what a worker that crashes does.

The folder is removed by the pool; if the pool's process was killed, by its workers when they notice; and if all of them
were killed, by the next pool of the same user.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch import logs
from anytorch.errors import OutOfMemory

log = logs.logger(__name__)

SHARED = Path("/dev/shm")
PREFIX = "anytorch-pool-"
LEAST = 64 << 10
ITEM = 4  # bytes of an int32 and of a float32


class Block:
    """A mapped file. `views` says where ids, starts and vectors of one task lie in it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), nbytes)

    def views(
        self, tokens: int, texts: int, width: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        ids: Any = np.frombuffer(self._map, np.int32, tokens)
        starts: Any = np.frombuffer(self._map, np.int32, texts + 1, ITEM * tokens)
        vectors: Any = np.frombuffer(self._map, np.float32, texts * width, ITEM * (tokens + texts + 1))
        return ids, starts, vectors.reshape(texts, width)

    def close(self) -> None:
        try:
            self._map.close()
        except BufferError:  # somebody still holds a view; the mapping goes when that does
            log.debug("%s is still in use", self.path)


class Blocks:
    """The pool's own folder of blocks, which are used again. Not thread-safe: the pool holds a lock."""

    def __init__(self) -> None:
        sweep()
        self.folder = _folder()
        self._free: list[Block] = []
        self._made = 0

    def take(self, tokens: int, texts: int, width: int) -> Block:
        """A block with room for one task. Raises OutOfMemory where no file system has room for it."""
        need = ITEM * (tokens + texts + 1 + texts * width)
        fitting = [block for block in self._free if block.nbytes >= need]
        if fitting:
            block = min(fitting, key=lambda block: block.nbytes)
            self._free.remove(block)
            return block
        # Nobody has use for those that are too small: batches grow until they have found their size.
        for small in self._free:
            self._drop(small)
        self._free.clear()
        return self._make(max(LEAST, 1 << (need - 1).bit_length()))

    def give(self, block: Block) -> None:
        self._free.append(block)

    def close(self) -> None:
        for block in self._free:
            block.close()
        self._free.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, nbytes: int) -> Block:
        self._made += 1
        path = self.folder / f"{self._made}.block"
        try:
            reserve(path, nbytes)
        except OSError as exc:
            path.unlink(missing_ok=True)
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise OutOfMemory(
                f"no room for {nbytes >> 20} MiB of shared memory in {self.folder.parent}",
                hint="lower batch_tokens, or enlarge /dev/shm (docker run --shm-size=1g)",
            ) from exc
        return Block(path, nbytes)

    def _drop(self, block: Block) -> None:
        block.close()
        try:
            block.path.unlink(missing_ok=True)
        except PermissionError:  # Windows, while a worker has it mapped: goes with the folder
            log.debug("%s is still mapped", block.path)


def reserve(path: Path, nbytes: int) -> None:
    """A file of that size whose room is really there: a write to a mapped hole on a full disk kills the process."""
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)


def _folder() -> Path:
    name = f"{PREFIX}{os.getpid()}-"
    if SHARED.is_dir() and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > 256 << 20:
        return Path(tempfile.mkdtemp(prefix=name, dir=SHARED))
    return Path(tempfile.mkdtemp(prefix=name))


def sweep() -> None:
    """Remove the folders of pools whose process is gone."""
    for parent in {SHARED, Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{PREFIX}*") if parent.is_dir() else ():
            owner = folder.name.removeprefix(PREFIX).partition("-")[0]
            if owner.isdigit() and not _alive(int(owner)):
                log.debug("removing %s: its process is gone", folder)
                shutil.rmtree(folder, ignore_errors=True)


def _alive(process: int) -> bool:
    if os.name != "posix":
        return True  # os.kill would end it there; the temporary folder is the system's to clean
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
