"""Ctrl-C that waits until what must be whole is whole.

Python raises KeyboardInterrupt between any two instructions of the main thread, also within a `finally`: what several steps
change is put right afterwards only if it cannot come in the middle of them.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The functions beneath signal's, which turn every handler into a member of an enum and back: 2 µs each, and submissions to a
# GPU hold interrupts back thousands of times a second.
_beneath: Any = sys.modules.get("_signal", signal)
_handler: Callable[[int], Any] = _beneath.getsignal
_set_handler: Callable[[int, Any], Any] = _beneath.signal
_SIGINT = int(signal.SIGINT)

SAME_PRESS_S = 1.0  # torchrun hands Ctrl-C on to processes that a terminal has told already


class Interrupt:
    """`with interrupt: … with interrupt.held(): …`: in the inner block Ctrl-C waits for its end; a second one does not.

    (One that follows within SAME_PRESS_S is the first one again.)

    Only where Python's own handler is in place: a program with another one knows what it does, and KeyboardInterrupt then
    comes when it comes. `broken` says that it came inside a block that should have been whole. With `any_handler` the
    program's own handler waits in the same way: it is called where KeyboardInterrupt would be raised.

    `first`: is this the process that saves? The others go on until it has left: in its last step it waits for theirs.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, first: bool = True, any_handler: bool = False
    ) -> None:
        self.clock, self.first, self.any_handler = clock, first, any_handler
        self.ignoring = self.broken = False
        self.holding = 0  # blocks, one within the other
        self.asked_at: float | None = None
        self._before: Any = None
        self._theirs: Any = None  # the program's own handler

    def __enter__(self) -> Interrupt:
        main = threading.current_thread() is threading.main_thread()  # handlers can be set there alone
        current = _handler(_SIGINT)
        usual = current is signal.default_int_handler
        if main and (usual or (self.any_handler and callable(current))):
            self._theirs = None if usual else current
            self._before = _set_handler(_SIGINT, self._interrupted)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._before is not None:
            _set_handler(_SIGINT, self._before)
            self._before = None

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        now, before = self.clock(), self.asked_at
        if self.ignoring or (before is not None and now - before < SAME_PRESS_S):
            return
        self.asked_at = now
        if before is not None or (self.first and not self.holding):
            self._deliver(frame)

    def _deliver(self, frame: FrameType | None) -> None:
        if self._theirs is None:
            raise KeyboardInterrupt
        self.asked_at = None  # it may return, and has had this one
        self._theirs(signal.SIGINT, frame)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.holding += 1
        try:
            yield
        except KeyboardInterrupt:
            self.broken = True
            raise
        finally:
            self.holding -= 1
        if not self.holding:
            self.check()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """A context that ignores Ctrl-C until it ends."""
        self.ignoring = True
        try:
            yield
        finally:
            self.ignoring = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if one waits: for places where nothing is half done."""
        if self.first and self.asked_at is not None:
            self._deliver(None)


@contextmanager
def held_back() -> Iterator[None]:
    """A context in which Ctrl-C waits for the end, or for a `check`; a second one, SAME_PRESS_S later, does not.

    What waits is KeyboardInterrupt, or the call of the handler that the program has for SIGINT, which may raise as well.
    In other threads than the main one, where KeyboardInterrupt never comes, it does nothing.
    """
    outer = _in_place()
    if outer is not None:
        with outer.held():
            yield
        return
    interrupt = Interrupt(any_handler=True)
    interrupt.holding = 1  # before its handler is in place, and until it is gone: there is no instruction in between
    try:
        with interrupt:
            yield
    finally:
        interrupt.check()


def check() -> None:
    """Raise the KeyboardInterrupt, or call the program's handler, that `held_back` keeps waiting, if there is one."""
    interrupt = _in_place()
    if interrupt is not None:
        interrupt.check()


def _in_place() -> Interrupt | None:
    """The Interrupt whose handler is in place, for the thread that it concerns."""
    if threading.current_thread() is not threading.main_thread():
        return None
    owner = getattr(_handler(_SIGINT), "__self__", None)
    return owner if isinstance(owner, Interrupt) else None
