"""A progress bar at a terminal, or a caller's own function; nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

Verbose = bool | Callable[[int, int], None]


class Progress:
    """`with Progress(verbose, total) as bar: bar.at(3)`. A function is called with the steps done and all there are; what it
    raises ends the forecast."""

    def __init__(self, wanted: Verbose, total: int) -> None:
        self.total = total
        self.told = wanted if callable(wanted) else None
        self.wanted = wanted is True and sys.stderr is not None and sys.stderr.isatty()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if self.wanted:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("forecasting", total=self.total)
            self.bar.start()
        return self

    def at(self, done: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        if self.told is not None:
            self.told(done, self.total)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
