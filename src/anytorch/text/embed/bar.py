"""Progress: the caller's own function, or a bar on standard error with texts per second and the time that is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Progress = Callable[[int, "int | None"], None]  # texts done, and how many there are (None: not known)


def shown(progress: Progress | bool | None, title: str = "encoding") -> AbstractContextManager[Progress | None]:
    """A context that gives what to report to: the caller's function, a bar (True), or nothing."""
    if progress is True:
        return progress_bar(title)
    return nullcontext(progress or None)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """Gives what to call with texts done and their number (None: not known); None itself off a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[rate]}"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, rate="")

        def show(done: int, total: int | None) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate=f"{speed:,.0f} texts/s" if speed else "")

        yield show
