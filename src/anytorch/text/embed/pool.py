"""One encoder made of several: a process per device, all served from one queue of batches.

To the engine a pool is an encoder that can be given batches ahead (`protocol.AsyncEncoder`). Each worker is a fresh
interpreter (so a program needs no `if __name__ == "__main__"` guard) with a thread here that takes the next batch from
the queue when its worker is free: faster devices take more. A worker that dies gives its batches back to the queue and is
started once more, and again as long as it finishes batches in between; a batch that fails is tried on another worker before
its error is raised.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch import logs, settings
from anytorch.child_process import python_command
from anytorch.errors import AnytorchError, DeviceError, DeviceLost, ModelError, OutOfMemory, UsageError
from anytorch.text.checkpoints.checkpoint import Floats, Ints
from anytorch.text.embed.pool_worker import END, Block, Blocks, main, send
from anytorch.text.embed.protocol import batches
from anytorch.text.embed.tokens import Tokens
from anytorch.workers import start

log = logs.logger(__name__)

FACTORY = "anytorch.text.embed.pool_worker:build"
DEPTH = 2  # batches a worker has at once: one it computes, one that waits so that it need not
SPLIT_TOKENS = 512  # a single batch is shared out among workers in parts of at least so many tokens
CLOSE_S = 10.0
IDLE_S = 1.0  # how often an idle worker's thread looks whether its pool still exists


@dataclass(frozen=True)
class PoolJob:
    """What one worker builds. `arguments` go to the factory; `cores` are those it may use, () for any."""

    device: str
    arguments: dict[str, Any]
    cores: tuple[int, ...] = ()
    factory: str = FACTORY


@dataclass(eq=False)
class PoolTask:
    """One batch, from `submit` to its answer."""

    number: int
    block: Block
    tokens: int
    texts: int
    tried: list[str] = field(default_factory=list)  # the workers that did not finish it
    done: threading.Event = field(default_factory=threading.Event)
    vectors: Any = None
    error: Exception | None = None
    out: Any = None  # where the vectors go, and to which rows of it; None: to an array of their own
    places: Any = None

    def result(self) -> Floats:
        while not self.done.wait(0.5):  # not for ever at once: Ctrl-C must get through on every system
            pass
        if self.error is not None:
            raise self.error
        vectors: Floats = self.vectors
        return vectors


class PoolEncoder:
    """Several encoders of one model behind the protocol of one. Thread-safe.

    Raises what a worker's own start raised (as ModelError or DeviceError) when none can start; workers that cannot
    start beside others that can are left out, and `describe()` says why.
    """

    def __init__(self, jobs: Sequence[PoolJob], *, start_timeout_s: float = 600.0) -> None:
        if not jobs:
            raise ValueError("a pool needs at least one worker")
        self._change = threading.Condition()
        self._waiting: deque[PoolTask] = deque()
        self._numbers = self._idle = 0
        self.closed = False
        self._notes: list[str] = []
        self._blocks = Blocks()
        self.folder = self._blocks.folder
        self._workers = [PoolWorker(self, place, job) for place, job in enumerate(jobs)]
        # Also when nobody closes the pool: at the interpreter's end, or when the pool is forgotten.
        self._finish = weakref.finalize(self, _end, self._workers, self._blocks)
        try:
            for worker in self._workers:
                start(worker.thread)
            with self._change:
                self._change.wait_for(lambda: all(w.ready or w.failure for w in self._workers), start_timeout_s)
            if slow := [worker.job.device for worker in self._workers if not worker.ready and not worker.failure]:
                raise DeviceError(f"no answer after {start_timeout_s:g} s from the workers on {', '.join(slow)}")
            failed = [worker.failure for worker in self._workers if worker.failure is not None]
            if len(failed) == len(self._workers):
                raise failed[0]
        except BaseException:
            self.close()
            raise
        facts = [worker.ready for worker in self._workers if worker.ready]
        self.width: int = facts[0]["width"]
        self.padded: bool = any(one["padded"] for one in facts)
        self.normalize: bool = all(one["normalize"] for one in facts)
        self.in_flight = DEPTH * len(facts)  # the runner sends one more than this ahead

    # --- the protocol of an encoder ----------------------------------------------------------------------------------

    def submit(
        self, ids: Ints, starts: Ints, out: Floats | None = None, places: npt.NDArray[np.intp] | None = None
    ) -> PoolTask:
        tokens, texts = len(ids), len(starts) - 1
        with self._change:
            self._check_open()
            block = self._blocks.take(tokens, texts, self.width)
            self._numbers += 1
            task = PoolTask(self._numbers, block, tokens, texts, out=out, places=places)
        to_ids, to_starts, _ = block.views(tokens, texts, self.width)
        to_ids[:] = ids
        to_starts[:] = starts
        with self._change:
            self._check_open()  # again: nobody would look at a batch that comes after the end
            self._waiting.append(task)
            self._change.notify_all()
        return task

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the engine is closed")
        if not self._hopeful:
            raise _all_ended(self._notes[-1] if self._notes else "all have ended")

    def run(self, ids: Ints, starts: Ints) -> Floats:
        """One batch, shared out among the workers: a text's vector does not depend on its neighbours."""
        workers = sum(1 for worker in self._workers if worker.alive)
        part_tokens = max(SPLIT_TOKENS, -(-len(ids) // max(1, workers)))
        whole = Tokens(ids, starts, 0)
        parts = batches(whole.lengths.tolist(), part_tokens, padded=False)
        tasks = [self.submit(*whole.part(part.start, part.stop)[:2]) for part in parts]
        return np.concatenate([task.result() for task in tasks])

    def describe(self) -> dict[str, Any]:
        """The first worker's description, and what is known of each."""
        about = dict(next((worker.ready["about"] for worker in self._workers if worker.ready), {}))
        about["workers"] = [
            {"device": worker.job.device, "alive": worker.alive, "batches": worker.finished, "starts": worker.starts}
            for worker in self._workers
        ]
        if self._notes:
            about["pool_notes"] = list(self._notes)
        return about

    def close(self) -> None:
        with self._change:
            self.closed = True
            left, self._waiting = self._waiting, deque()
            self._change.notify_all()
        for task in left:
            self.finish(task, error=UsageError("the engine is closed"))
        for worker in self._workers:
            worker.end()
        for worker in self._workers:
            if worker.thread.is_alive() and worker.thread is not threading.current_thread():
                worker.thread.join(CLOSE_S)
        self._finish()

    @property
    def process_ids(self) -> list[int | None]:
        """The workers' processes, None for one that has ended for good."""
        return [worker.process_id for worker in self._workers]

    # --- what the workers' threads call ------------------------------------------------------------------------------

    def next_task(self, *, wait: bool, avoid: str) -> PoolTask | None:
        """The next batch for a worker; None when there is none, with `wait` after IDLE_S, or when the pool is closed.

        Without `wait` the worker has one already: it gets another only if that keeps nobody idle.
        """
        with self._change:
            if self.closed or (not wait and len(self._waiting) <= self._idle):
                return None
            task = self._pick(avoid)
            if task is None and wait:
                self._idle += 1
                self._change.wait(IDLE_S)
                self._idle -= 1
                task = None if self.closed else self._pick(avoid)
            return task

    def _pick(self, avoid: str) -> PoolTask | None:
        """Batches that failed on this worker are for the others, if there are any."""
        others = any(worker.alive and worker.name != avoid for worker in self._workers)
        for task in self._waiting:
            if not others or avoid not in task.tried:
                self._waiting.remove(task)
                return task
        return None

    def again(self, task: PoolTask, name: str, error: Exception) -> None:
        """Give a batch that a worker did not finish to another one first, unless two have tried already."""
        task.tried.append(name)
        with self._change:
            if len(task.tried) < 2 and self._hopeful:
                self.requeue(task)
                return
        self.finish(task, error=error)

    def requeue(self, task: PoolTask) -> None:
        """A batch that its worker had not begun."""
        with self._change:
            if not self.closed:
                self._waiting.appendleft(task)
                self._change.notify_all()
                return
        self.finish(task, error=UsageError("the engine is closed"))

    def finish(self, task: PoolTask, error: Exception | None = None) -> None:
        if error is None:
            vectors = task.block.views(task.tokens, task.texts, self.width)[2]
            if task.out is None:
                task.vectors = np.array(vectors)  # a copy of its own
            else:
                task.out[task.places] = vectors
        task.error = error
        with self._change:
            if not self.closed:
                self._blocks.give(task.block)
        task.done.set()

    def note(self, text: str) -> None:
        self._notes.append(text)
        log.warning("%s", text)

    def started(self) -> None:
        with self._change:
            self._change.notify_all()

    def gone(self, why: str) -> None:
        """A worker has ended for good; with the last one, so have all batches."""
        with self._change:
            if self._hopeful:
                return
            left, self._waiting = self._waiting, deque()
        for task in left:
            self.finish(task, error=_all_ended(why))

    # --- inside ------------------------------------------------------------------------------------------------------

    @property
    def _hopeful(self) -> bool:
        """True if a worker is there, or may be again."""
        return any(worker.alive or worker.may_restart for worker in self._workers)


def _all_ended(why: str) -> DeviceLost:
    return DeviceLost(f"all workers have ended: {why}", hint="create a new engine")


def _end(workers: Sequence[PoolWorker], blocks: Blocks) -> None:
    for worker in workers:
        worker.end()
    for worker in workers:
        worker.wait(CLOSE_S)
    blocks.close()


class PoolWorker:
    """A device's process and the thread that feeds it."""

    STARTS = 2  # without a finished batch in between: the first, and once more

    def __init__(self, pool: PoolEncoder, place: int, job: PoolJob) -> None:
        self._pool = weakref.proxy(pool)  # the thread must not keep a forgotten pool alive
        self.job = job
        self.name = f"worker {place} ({job.device})"
        self._popen: subprocess.Popen[str] | None = None  # whichever process it is now
        self._ending = False
        self.ready: dict[str, Any] = {}
        self.failure: AnytorchError | None = None
        self.alive = False
        self.starts = self.finished = 0
        self._fruitless = 0  # starts since a batch was finished
        self._said = pool.folder / f"{place}.stderr"
        self._given: deque[PoolTask] = deque()
        self.thread = threading.Thread(target=self._run, name=f"anytorch-pool-{place}", daemon=True)

    @property
    def may_restart(self) -> bool:
        return self._fruitless < self.STARTS and self.failure is None and not self._ending

    @property
    def process_id(self) -> int | None:
        return None if self._popen is None or self._popen.poll() is not None else self._popen.pid

    def end(self) -> None:
        """Ask the process to finish, and let none take its place."""
        self._ending = True
        self._close_input()

    def wait(self, timeout_s: float) -> None:
        """Wait for the process to end, and kill it if it does not."""
        popen = self._popen
        if popen is None:
            return
        try:
            popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        if popen.stdout is not None:
            popen.stdout.close()

    def _close_input(self) -> None:
        """Close the process's input, which ends it."""
        pipe = None if self._popen is None else self._popen.stdin
        if pipe is not None and not pipe.closed:
            try:
                pipe.write(END + "\n")
                pipe.close()
            except (OSError, ValueError) as exc:  # a line that could not be flushed to a process that is gone
                log.debug("closing a worker's input: %s", exc)

    def _run(self) -> None:
        try:
            while self.may_restart and not self._pool.closed:
                self.starts += 1
                self._fruitless += 1
                try:
                    popen = self._start()
                    if popen is not None:
                        self._serve(popen)
                except (OSError, ValueError) as exc:  # it ended; ValueError: its input was closed
                    log.debug("%s: %s", self.name, exc)
                self._ended()
        except ReferenceError:
            return  # the pool was forgotten, and its finalizer ends the process
        except Exception as exc:
            # A mistake of ours: without this, whoever waits for the worker's batches would wait for ever.
            self.failure = DeviceError(f"{self.name}: {type(exc).__name__}: {exc}")
            self._ended()
            raise

    def _start(self) -> subprocess.Popen[str] | None:
        environment = {**os.environ, "ANYTORCH_CACHE_DIR": str(settings.cache_folder())}
        if self.job.cores:
            environment["OMP_NUM_THREADS"] = str(len(self.job.cores))
        with self._said.open("w") as said:
            popen = subprocess.Popen(
                python_command(f"{main.__module__}:{main.__name__}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                text=True,
                encoding="utf-8",
            )
        self._popen = popen
        assert popen.stdin is not None and popen.stdout is not None
        described = {"factory": self.job.factory, "arguments": self.job.arguments, "cores": list(self.job.cores)}
        send(popen.stdin, {**described, "folder": str(self._pool.folder)})
        line = popen.stdout.readline()
        told = json.loads(line) if line else {}
        if "ready" in told:
            self.ready, self.alive = told["ready"], True
            self._pool.started()
            return popen
        if "failed" in told:
            error = told["failed"]
            kind = {"ModelError": ModelError}.get(error["type"], OutOfMemory if error["memory"] else DeviceError)
            words = f"{self.name} did not start: {_in_words(error)}"
            self._pool.note(words)
            self.failure = kind(words, hint=error["hint"])
        return None

    def _serve(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdin is not None and popen.stdout is not None
        while True:
            while len(self._given) < DEPTH:
                task = self._pool.next_task(wait=not self._given, avoid=self.name)
                if task is None:
                    break
                if not self._given and popen.poll() is not None:  # it died idle: nobody has tried this one
                    self._pool.requeue(task)
                    return
                self._given.append(task)
                where = {"block": str(task.block.path), "nbytes": task.block.nbytes}
                send(popen.stdin, {"task": task.number, **where, "tokens": task.tokens, "texts": task.texts})
            if not self._given:
                if self._pool.closed or popen.poll() is not None:
                    return
                continue
            line = popen.stdout.readline()
            if not line:
                return
            told = json.loads(line)
            task = self._given.popleft()
            assert told["task"] == task.number, "a worker answers in the order it was asked"
            if "error" not in told:
                self.finished += 1
                self._fruitless = 1  # this start's
                self._pool.finish(task)
                continue
            error = told["error"]
            words = f"{self.name}: {_in_words(error)}"
            if error["memory"]:  # for the runner, which makes the batch smaller
                self._pool.finish(task, error=OutOfMemory(words, hint=error["hint"]))
            else:
                log.warning("%s", words)
                self._pool.again(task, self.name, DeviceError(words, hint=error["hint"]))

    def _ended(self) -> None:
        """The process is gone, or the pool is closed: its batches go to the others."""
        self.alive = False
        self._close_input()
        if self._pool.closed:
            while self._given:
                self._pool.finish(self._given.popleft(), error=UsageError("the engine is closed"))
            return
        self.wait(CLOSE_S)
        status = self._popen.returncode if self._popen is not None else None
        said = self._said.read_text(errors="replace").strip().splitlines()[-3:]
        words = f"{self.name} ended with status {status}" + (f": {' / '.join(said)}" if said else "")
        if self.failure is None:
            if not self.may_restart and not self.ready:
                self.failure = DeviceLost(words)
            self._pool.note(words + (" and is started again" if self.may_restart else ""))
        given, self._given = self._given, deque()
        for number, task in enumerate(given):
            if number == 0:  # it was being computed: it may be what ended the worker
                self._pool.again(task, self.name, DeviceLost(words))
            else:
                self._pool.requeue(task)
        if not self.may_restart:
            self._pool.gone(words)
        self._pool.started()


def _in_words(error: dict[str, Any]) -> str:
    return f"{error['type']}: {error['message']}"
