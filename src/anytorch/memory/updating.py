"""Updating blocks at their home beside what else the program does: one thread, of what is ready what is needed first.

A block that waits here or is being updated cannot be fetched to the device (`Mover.begin_change`), so nobody ever computes
with half of an update: whoever needs the block waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anytorch.errors import ModelError
from anytorch.memory.mover import Mover

THREAD_NAME = "anytorch-optimizer"
POLL_S = 0.0003


@dataclass(frozen=True)
class Work:
    do: Callable[[], None]
    ready: Callable[[], bool]  # are its gradients there? The device sends them in its own time


class Updates:
    """`add` queues the update of a block, `wait` returns when all are done. A thread exists only while there is work."""

    def __init__(self, mover: Mover, order: Sequence[str]) -> None:
        self._mover = mover
        self._rank = {name: rank for rank, name in enumerate(order)}
        self._waiting: dict[str, Work] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, name: str, do: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Queue a block's update; the block cannot be fetched from now on until it is done.

        Raises RuntimeError, with the block as it was, where the system gives no thread.
        """
        self._mover.begin_change(name)
        try:
            with self._changed:
                if self._thread is None:
                    # No daemon: a program that ends after its last step waits for it. A thread that the interpreter ends
                    # in the middle of torch's code takes the process down with it.
                    thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=False)
                    thread.start()  # begins when `_changed` is free, so it finds what is added next
                    self._thread = thread
                self._waiting[name] = Work(do, ready)
        except BaseException:
            self._mover.end_change(name)
            raise

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._waiting

    def names(self) -> set[str]:
        """Blocks that wait for their update or are being updated."""
        with self._changed:
            return set(self._waiting)

    def wait(self) -> None:
        """Return when every update is done. Raises ModelError if one failed: the weights are then not to be trusted."""
        with self._changed:
            while self._thread is not None:
                self._changed.wait()
            failure, self._failure = self._failure, None
        if failure is not None:
            raise ModelError(
                f"a step of the optimizer failed, so some weights are updated and others are not: {failure}",
                hint="go back to the last checkpoint (anytorch.memory.resume_training)",
            ) from failure

    def failed(self) -> bool:
        return self._failure is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                name = self._next()
                if name is None:
                    self._changed.wait(POLL_S)
                    continue
                work = self._waiting[name]
            try:
                if self._failure is None:
                    work.do()
            except BaseException as exc:  # noqa: BLE001  (raised by `wait`, in the thread that asked for the step)
                self._failure = exc
            finally:
                with self._changed:
                    del self._waiting[name]
                self._mover.end_change(name)

    def _next(self) -> str | None:
        ready = [name for name, work in self._waiting.items() if self._is_ready(work)]
        return min(ready, key=self._rank.__getitem__, default=None)

    def _is_ready(self, work: Work) -> bool:
        """After a failure all are, to be left out: a device with an error may never send what they wait for."""
        if self._failure is None:
            try:
                return work.ready()
            except BaseException as exc:  # noqa: BLE001  (an error of the device; raised by `wait`)
                self._failure = exc
        return True
