"""One worker of a pool: a process with one encoder on one device, and the memory it shares with the pool.

Started by `pool`, ended by the end of its input. Lines of JSON come on standard input and go to what was standard output;
token ids and vectors lie in shared blocks, and nothing is pickled. First line in: what to build. First line out:
{"ready": …} or {"failed": …}. Then one line per task: in {"task", "block", "nbytes", "tokens", "texts"}, out {"task"} or
{"task", "error", …}. The line `end` is the last.

A block is a file in a folder of the pool's own, mapped by both sides: in /dev/shm, which is memory, where that has room,
else in the temporary folder. Not `multiprocessing.shared_memory`: its tracker unlinks a block when any process that has
attached it ends, which is what a worker that crashes does. The folder is removed by the pool; if the pool's process was
killed, by its workers when they notice; and if all of them were killed, by the next pool of the same user.
"""

from __future__ import annotations

import errno
import importlib
import json
import mmap
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from anytorch import logs
from anytorch.child_process import is_alive
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError, OutOfMemory
from anytorch.text.checkpoints.checkpoint import Floats, Ints
from anytorch.text.embed.encoder_device import build_encoder, choose_device
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import read_recipe

log = logs.logger(__name__)

END = "end"
SHARED = Path("/dev/shm")
PREFIX = "anytorch-pool-"
LEAST = 64 << 10
ITEM = 4  # bytes of an int32 and of a float32


def build(*, model: str, device: str, pooling: list[str], **options: Any) -> Encoder:
    """The encoder of this worker. Another function of this shape can be named instead (`factory`)."""
    encoder, why = build_encoder(choose_device(device), read_recipe(Path(model)), tuple(pooling), **options)
    log.debug("%s: %s", device, why)
    return encoder


def main(_: list[str]) -> int:
    # Ctrl-C reaches every process of the terminal: the pool decides what becomes of it, not each worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    requests = sys.stdin
    first = requests.readline()
    if not first:
        return 0
    job = json.loads(first)
    if job["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job["cores"])
    try:
        module, _, name = job["factory"].partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), name)(**job["arguments"])
    except BaseException as exc:  # whatever it is, the pool must hear of it
        send(answers, {"failed": described(exc)})
        raise
    facts = {"width": encoder.width, "padded": encoder.padded, "normalize": bool(getattr(encoder, "normalize", False))}
    send(answers, {"ready": {**facts, "about": encoder.describe()}})
    blocks: dict[str, Block] = {}
    asked_to_end = False
    with suppress(BrokenPipeError):
        for line in requests:
            asked_to_end = line.strip() == END
            if asked_to_end:
                break
            send(answers, answer(encoder, json.loads(line), blocks))
    encoder.close()
    if not asked_to_end:  # its input ended without a word: the pool is no more, and nobody else removes its folder
        shutil.rmtree(job["folder"], ignore_errors=True)
    return 0


def answer(encoder: Encoder, task: dict[str, Any], blocks: dict[str, Block]) -> dict[str, Any]:
    try:
        if task["block"] not in blocks:
            for old in [name for name in blocks if not Path(name).exists()]:
                blocks.pop(old).close()  # the pool has made a larger one
            blocks[task["block"]] = Block(Path(task["block"]), task["nbytes"])
        ids, starts, vectors = blocks[task["block"]].views(task["tokens"], task["texts"], encoder.width)
        vectors[:] = encoder.run(ids, starts)
    except Exception as exc:  # noqa: BLE001  (an error of one task; the pool raises it where the task came from)
        return {"task": task["task"], "error": described(exc)}
    return {"task": task["task"]}


def described(exc: BaseException) -> dict[str, Any]:
    message, hint = (exc.message, exc.hint) if isinstance(exc, AnytorchError) else (str(exc), "")
    return {"type": type(exc).__name__, "message": message, "hint": hint, "memory": is_out_of_memory(exc)}


def send(answers: IO[str], line: dict[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()


# --- shared memory ------------------------------------------------------------------------------------------------------


class Block:
    """A mapped file. `views` says where ids, starts and vectors of one task lie in it."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), nbytes)

    def views(self, tokens: int, texts: int, width: int) -> tuple[Ints, Ints, Floats]:
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
            if owner.isdigit() and not is_alive(int(owner)):
                log.debug("removing %s: its process has ended", folder)
                shutil.rmtree(folder, ignore_errors=True)
