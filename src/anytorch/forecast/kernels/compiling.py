"""Kernels compiled by threads, beside the forecasts that will use them."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from anytorch import logs

log = logs.logger(__name__)

COMPILERS = 4  # threads at most, on half of the processors
# Seconds after which Python lets another thread go on, while compilers run in this one: the thread that forecasts asks for
# its turn a hundred times per forecast, and with Python's own 5 ms a forecast took seconds.
TURN = 0.0005

_lock = threading.Lock()

Key = tuple[str, str]  # the names of a part and of a way to compute it
Task = Callable[[], None]


class Compiling:
    """Tasks that threads work off while others go on. A process that exits waits for those at hand, not for the rest."""

    def __init__(self, device: torch.device, tasks: Mapping[Key, Task], seconds: float) -> None:
        self.device, self.until = device, time.monotonic() + seconds
        self.waiting = deque(tasks.items())
        self.done: set[Key] = set()
        self.stopping = False
        count = min(COMPILERS, max(1, (os.cpu_count() or 1) // 2), len(tasks))
        self.threads = [threading.Thread(target=self._work, name="anytorch-compile", daemon=True) for _ in range(count)]
        self.at_work = count
        if count:
            atexit.register(self.stop)
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        with quick_turns():
            self._work_off()
        with _lock:
            self.at_work -= 1
            if self.at_work:
                return
        self.waiting.clear()  # what was not begun in time holds memory
        atexit.unregister(self.stop)

    def _work_off(self) -> None:
        while not self.stopping and time.monotonic() < self.until:
            try:
                key, task = self.waiting.popleft()
            except IndexError:
                return
            try:
                on_device(self.device, task)
            except Exception as exc:  # noqa: BLE001  (a compiler may raise anything, and running it says so again)
                log.debug("%s: not compiled ahead: %s: %s", self.device, type(exc).__name__, exc)
            self.done.add(key)

    @property
    def under_way(self) -> bool:
        return any(thread.is_alive() for thread in self.threads)

    def cancel(self) -> None:
        """Begin no more of them."""
        self.stopping = True
        self.waiting.clear()

    def stop(self) -> None:
        """Begin no more; returns when nothing is under way."""
        self.cancel()
        self.wait()

    def wait(self) -> None:
        for thread in self.threads:
            thread.join()


def on_device(device: torch.device, task: Task) -> None:
    """Run in a thread on this device: a new thread starts on the first one."""
    scope = getattr(torch.get_device_module(device), "device", None)
    if device.index is None or not callable(scope):
        task()
        return
    with scope(device):
        task()


_quick: list[float] = []  # Python's interval before, once per thread that wants quick turns


@contextmanager
def quick_turns() -> Iterator[None]:
    with _lock:
        _quick.append(_quick[0] if _quick else sys.getswitchinterval())
        sys.setswitchinterval(min(TURN, _quick[0]))
    try:
        yield
    finally:
        with _lock:
            before = _quick.pop()
            if not _quick:
                sys.setswitchinterval(before)
