"""A first-come, first-served lock; threading's own may go to the same thread again and again."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """`with turns: …`, first come, first served."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()  # until the one before hands it over
        except BaseException:  # Ctrl-C while waiting
            with self._mutex:
                was_waiting = mine in self._waiting
                if was_waiting:
                    self._waiting.remove(mine)
            if not was_waiting:
                self._hand_over()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hand_over()

    def _hand_over(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
