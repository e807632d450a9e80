"""Ctrl-C, held back where it would leave something half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """`with interrupt: … with interrupt.held(): …`: in the inner block Ctrl-C waits for its end; a second one does not.

    Only where Python's own handler is in place: a program with another one knows what it does, and KeyboardInterrupt then
    comes when it comes. `broken` says that it came inside a block that should have been whole.
    """

    def __init__(self) -> None:
        self.asked = self.holding = self.broken = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        if _is_ours():
            self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.holding and not self.asked:
            self.asked = True
            return
        raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        self.holding = True
        try:
            yield
        except KeyboardInterrupt:
            self.broken = True
            raise
        finally:
            self.holding = False
        if self.asked:
            raise KeyboardInterrupt

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """For what must be finished although Ctrl-C was pressed, and may be pressed again (torchrun sends it once more)."""
        if not _is_ours():
            yield
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_ours() -> bool:
    """Handlers can be set in the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
