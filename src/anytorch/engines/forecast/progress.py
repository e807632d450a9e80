"""A progress bar at a terminal, and nothing anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """`with Progress(verbose, total) as bar: bar.at(3)`."""

    def __init__(self, wanted: bool, total: int) -> None:
        self.total = total
        self.wanted = wanted and sys.stderr is not None and sys.stderr.isatty()
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

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
