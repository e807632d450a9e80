"""Candidates compiled by threads, beside the work that will use them, which does not wait for the compiler."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from anytorch import logs

log = logs.logger(__name__)

COMPILERS = 4  # threads at most, on half of the processors
# Seconds after which Python lets another thread go on, while compilers run in this one: the thread that forecasts asks for
# its turn a hundred times per forecast, and with Python's own 5 ms a forecast took seconds.
TURN = 0.0005

_lock = threading.Lock()

Key = tuple[str, str]  # the title of a question and the name of a candidate
Task = Callable[[], None]


def at_once(task: Task) -> None:
    task()


class Compiling:
    """Tasks that threads work off while others go on. A process that exits waits for those at hand, not for the rest.

    What is not begun after `seconds` is left out. `call` calls a task in its thread, on a device of its own say.
    """

    def __init__(self, tasks: Mapping[Key, Task], seconds: float, call: Callable[[Task], None] = at_once) -> None:
        self.call, self.until = call, time.monotonic() + seconds
        self.waiting = deque(tasks.items())
        self.done: set[Key] = set()
        self.stopping = False
        count = min(COMPILERS, max(1, (os.cpu_count() or 1) // 2), len(tasks))
        self.threads: list[threading.Thread] = []
        self.at_work = 0
        if count:
            atexit.register(self.stop)
        for _ in range(count):
            thread = threading.Thread(target=self._work, name="anytorch-compile", daemon=True)
            with _lock:  # it counts itself out when it ends
                try:
                    thread.start()
                except RuntimeError as exc:  # fewer compile beside; with none, what is used is compiled when it is used
                    log.info("only %d of %d threads could be started to compile: %s", len(self.threads), count, exc)
                    break
                self.threads.append(thread)
                self.at_work += 1
        if count and not self.threads:
            self.waiting.clear()
            atexit.unregister(self.stop)

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
                self.call(task)
            except Exception as exc:  # noqa: BLE001  (a compiler may raise anything, and running it says so again)
                log.debug("%s is not compiled ahead: %s: %s", key, type(exc).__name__, exc)
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
