"""Calls shared out among processes, one per device: what one device does for one caller, several do for many.

Each worker is a fresh interpreter that makes an object (`factory`, a "package.module:function") and calls its methods. All
take from one queue: faster devices do more. A worker that dies gives its call back to the queue and is started once more,
and again as long as it finishes calls in between; one that dies with nothing to do is noticed within a second. A call that
fails on one device is tried on another before its error is raised. Nothing is lost while one worker lives. (Embeddings have
a pool of their own, whose batches lie in shared memory.)

Arguments and answers are pickled, between processes of ours alone.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO, Any

from anytorch import errors, limits, logs
from anytorch.child_process import python_command
from anytorch.errors import AnytorchError, DeviceError, DeviceLost, UsageError
from anytorch.workers import start

log = logs.logger(__name__)
MAIN = "anytorch.device_pool:main"
STARTS = 2  # of a worker without a finished call in between: the first, and once more
TRIES = 2  # workers that may fail at a call
CLOSE_S = 10.0
IDLE_S = 0.5
# What is the caller's own mistake is so on every device.
CALLERS_OWN = ("UsageError", "InputError", "ModelError", "TypeError", "KeyError")


@dataclass(frozen=True)
class PoolJob:
    """What one worker makes. `environment` is added to this process's."""

    device: str
    factory: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    method: str
    asked: bytes  # the method and its arguments
    future: Future[Any] = field(default_factory=Future)
    failed_on: list[str] = field(default_factory=list)


class DevicePool:
    """`pool.submit("method", …)` → a Future. Thread-safe. Close it, or leave it to the interpreter's end.

    Raises what a worker's own start raised when none can start; workers that cannot start beside others that can are left
    out, and `describe()` says why.
    """

    def __init__(self, jobs: Sequence[PoolJob], *, start_timeout_s: float = 600.0) -> None:
        if not jobs:
            raise UsageError("a pool needs at least one device")
        limits.PROCESSES.check("number of devices", len(jobs))
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self.closed = False
        self.notes: list[str] = []
        self._workers = [_Worker(self, place, job) for place, job in enumerate(jobs)]
        self._finish = weakref.finalize(self, _end, self._workers)
        try:
            for worker in self._workers:
                start(worker.thread)
            with self._changed:
                self._changed.wait_for(lambda: all(w.ready or w.failure for w in self._workers), start_timeout_s)
            failures = [worker.failure for worker in self._workers if worker.failure is not None]
            if len(failures) == len(self._workers):
                raise failures[0]
            if not any(worker.ready for worker in self._workers):
                raise DeviceError(f"no worker has answered after {start_timeout_s:g} s")
        except BaseException:
            self.close()
            raise

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Raises UsageError for arguments that cannot go to another process, such as a function within another."""
        call = Call(method, _for_another((method, args, kwargs), f"an argument of {method}"))
        with self._changed:
            if self.closed:
                raise UsageError("the pool is closed")
            if not self._hopeful:
                raise _all_ended(self.notes)
            self._waiting.append(call)
            self._changed.notify_all()
        return call.future

    def describe(self) -> list[dict[str, Any]]:
        """Per worker: its device, whether it lives, the calls it finished, how often it was started, why it failed."""
        return [
            {
                "device": worker.job.device,
                "alive": worker.alive,
                "calls": worker.finished,
                "starts": worker.starts,
                **({"failure": str(worker.failure)} if worker.failure is not None else {}),
            }
            for worker in self._workers
        ]

    @property
    def process_ids(self) -> list[int | None]:
        return [worker.process_id for worker in self._workers]

    def close(self) -> None:
        with self._changed:
            self.closed = True
            left, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for call in left:
            _refuse(call, UsageError("the pool is closed"))
        self._finish()
        for worker in self._workers:
            if worker.thread.is_alive() and worker.thread is not threading.current_thread():
                worker.thread.join(CLOSE_S)

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for the workers' threads ------------------------------------------------------------------------------------

    def _next(self, name: str) -> Call | None:
        """The next call for a worker, those that failed on it only if no other is there; None after a while without one."""
        with self._changed:
            for _ in range(2):
                others = any(worker.alive and worker.name != name for worker in self._workers)
                call = next((one for one in self._waiting if not others or name not in one.failed_on), None)
                if call is not None:
                    self._waiting.remove(call)
                    return call
                if self.closed:
                    return None
                self._changed.wait(IDLE_S)
            return None

    def _back(self, call: Call) -> None:
        """Put a call that was taken and not tried first in the queue again."""
        with self._changed:
            if not self.closed:
                self._waiting.appendleft(call)
                self._changed.notify_all()
                return
        _refuse(call, UsageError("the pool is closed"))

    def _again(self, call: Call, name: str, error: Exception) -> None:
        call.failed_on.append(name)
        with self._changed:
            if len(call.failed_on) < TRIES and self._hopeful and not self.closed:
                self._waiting.appendleft(call)
                self._changed.notify_all()
                return
        call.future.set_exception(error)

    def _tell(self, note: str = "") -> None:
        with self._changed:
            if note:
                self.notes.append(note)
                log.warning("%s", note)
            self._changed.notify_all()

    def _gone(self) -> None:
        """A worker has ended for good; with the last one, so have all calls."""
        with self._changed:
            self._changed.notify_all()
            if self._hopeful:
                return
            left, self._waiting = self._waiting, deque()
        for call in left:
            _refuse(call, _all_ended(self.notes))

    @property
    def _hopeful(self) -> bool:
        return any(worker.alive or worker.starting or worker.may_start for worker in self._workers)


def _refuse(call: Call, error: Exception) -> None:
    """End a call that no worker has begun, unless its caller has cancelled it."""
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _all_ended(notes: Sequence[str]) -> DeviceLost:
    return DeviceLost(f"all workers have ended: {notes[-1] if notes else 'none is left'}", hint="make a new pool")


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.end()


class _Worker:
    """A device's process and the thread that feeds it."""

    def __init__(self, pool: DevicePool, place: int, job: PoolJob) -> None:
        self._pool = weakref.proxy(pool)  # the thread must not keep a forgotten pool alive
        self.job = job
        self.name = f"worker {place} ({job.device})"
        self._asked = _for_another((job.factory, dict(job.arguments)), f"an argument for {job.device}")
        self.ready = self.alive = self.starting = self._ending = False
        self.failure: AnytorchError | None = None
        self.starts = self.finished = self._fruitless = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run, name=f"anytorch-device-pool-{place}", daemon=True)

    @property
    def may_start(self) -> bool:
        return self._fruitless < STARTS and self.failure is None and not self._ending

    @property
    def process_id(self) -> int | None:
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def end(self) -> None:
        """Ask the process to finish, let none take its place, and kill it if it does not."""
        self._ending = True
        process = self._process
        if process is None:
            return
        try:
            if process.stdin is not None:
                process.stdin.close()
        except OSError as exc:
            log.debug("closing a worker's input: %s", exc)
        _wait_or_kill(process)

    def _run(self) -> None:
        try:
            while self.may_start and not self._pool.closed:
                self.starts += 1
                self.starting = True
                self._fruitless += 1
                self._serve()
        except ReferenceError:  # nobody has the pool any more
            return
        finally:
            self.alive = self.starting = False
        if not self.ready and self.failure is None and not self._ending:
            self.failure = DeviceLost(f"{self.name} ended before it was ready, {self.starts} times")
        try:
            self._pool._gone()
        except ReferenceError:
            return

    def _serve(self) -> None:
        """One process, from its start to its end."""
        try:
            process = self._process = subprocess.Popen(
                python_command(MAIN),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **self.job.environment},
            )
        except OSError as exc:  # no memory, or no more processes for this user
            self.failure = DeviceError(f"{self.name} cannot be started: {exc}")
            self._pool._tell(str(self.failure))
            return
        assert process.stdin is not None and process.stdout is not None
        call: Call | None = None
        try:
            send(process.stdin, self._asked)
            kind, what = receive(process.stdout)
            if kind != "ready":
                self.failure = error_of(what)
                self._pool._tell(f"{self.name} cannot start: {self.failure}")
                return
            self.ready = self.alive = True
            self.starting = False
            self._pool._tell()
            while not self._ending:
                call = self._pool._next(self.name)
                if process.poll() is not None:  # between two calls: nobody has tried this one
                    if call is not None:
                        self._pool._back(call)
                        call = None
                    raise EOFError("the process ended between two calls")
                if call is None:
                    if self._pool.closed:
                        return
                    continue
                if not call.future.set_running_or_notify_cancel():  # nobody wants it any more
                    call = None
                    continue
                send(process.stdin, call.asked)
                kind, what = receive(process.stdout)
                done, call = call, None
                if kind == "answer":
                    self.finished += 1
                    self._fruitless = 0
                    done.future.set_result(what)
                elif what["kind"] in CALLERS_OWN:
                    done.future.set_exception(error_of(what))
                else:
                    self._again(done, error_of(what))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as exc:  # ValueError: its input was closed
            if not self._ending:
                self.end_process(process)
                status = process.returncode
                self._pool._tell(f"{self.name} has ended with status {status}")
                if call is not None:
                    lost = DeviceLost(f"{self.name} ended during {call.method} (status {status})")
                    lost.__cause__ = exc
                    self.alive = self.starting = False
                    self._again(call, lost)
            elif call is not None:
                call.future.set_exception(UsageError("the pool is closed"))
        finally:
            self.alive = self.starting = False
            self.end_process(process)

    def _again(self, call: Call, error: Exception) -> None:
        again: Future[Any] = (
            Future()
        )  # a future that runs cannot be run again: another takes its place for the next try
        before = call.future
        call.future = again
        again.add_done_callback(lambda done: _pass_on(done, before))
        self._pool._again(call, self.name, error)

    @staticmethod
    def end_process(process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError as exc:
                log.debug("closing a worker's pipe: %s", exc)
        _wait_or_kill(process)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pass_on(done: Future[Any], to: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


def _for_another(what: Any, name: str) -> bytes:
    try:
        return packed(what)
    except (pickle.PicklingError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"{name} cannot go to another process: {exc}", hint="pass data, and functions of modules alone"
        ) from exc


def packed(what: Any) -> bytes:
    return pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)


def send(pipe: IO[bytes], what: bytes) -> None:
    """What is `packed` as a whole: half of it would be taken for the beginning of the next."""
    pipe.write(what)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    return pickle.load(pipe)


def described(exc: BaseException) -> dict[str, str]:
    return {
        "kind": type(exc).__name__,
        "message": str(getattr(exc, "message", exc)),
        "hint": str(getattr(exc, "hint", "")),
    }


def error_of(what: Mapping[str, str]) -> AnytorchError:
    kind = getattr(errors, what["kind"], None)
    if isinstance(kind, type) and issubclass(kind, AnytorchError):
        return kind(what["message"], hint=what["hint"])
    return DeviceError(f"{what['kind']}: {what['message']}")


def main(_: list[str]) -> int:
    """A worker: what to make, then calls, on standard input; answers on what was standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal: the pool decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the answers
    requests = sys.stdin.buffer
    try:
        factory, arguments = receive(requests)
    except EOFError:
        return 0
    try:
        module, _, name = factory.partition(":")
        made = getattr(importlib.import_module(module), name)(**arguments)
    except BaseException as exc:  # noqa: BLE001  (whatever it is, the pool must hear of it)
        send(answers, packed(("failed", described(exc))))
        return 1
    send(answers, packed(("ready", None)))
    while True:
        try:
            method, args, kwargs = receive(requests)
        except EOFError:
            return 0
        try:
            answer = packed(("answer", getattr(made, method)(*args, **kwargs)))
        except Exception as exc:  # noqa: BLE001  (the caller gets it)
            log.debug("%s failed", method)
            answer = packed(("error", described(exc)))
        send(answers, answer)
