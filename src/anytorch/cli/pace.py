"""Progress lines where no bar can be shown: an estimate after the first steps, then a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from anytorch.counts import counted

MEASURED_S = 3.0  # of the first steps, before the rest is guessed from them
LONG_S = 60.0  # work with less than this before it is not worth a guess
EVERY_S = 30.0


class Pace:
    """Tracks long work: `at` takes the progress and returns a line to print, or "".

    The first call is where the measuring starts: what lies before it (loading, compiling) is not done again. Later guesses
    go by the steps since the last line alone, because steps may become dearer on the way.
    """

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.clock = title, clock
        self.mark: tuple[int, float] | None = None  # steps and time, from which the next guess is made
        self.guessed = False

    def at(self, done: int, total: int, what: str = "") -> str:
        now = self.clock()
        if self.mark is None or done < self.mark[0]:  # or other work under the same title
            self.mark = (done, now)
            return ""
        before, since = self.mark
        passed = now - since
        if passed < (EVERY_S if self.guessed else MEASURED_S) or not before < done < total:
            return ""
        left = passed / (done - before) * (total - done)
        if not self.guessed:
            self.guessed = True  # and the mark stays: the next line comes half a minute after the first step
            return f"{self.title}: this takes about {duration(left)}" if left >= LONG_S else ""
        self.mark = (done, now)
        detail = f", {what}" if what else ""
        return f"{self.title}: {done:,} of {total:,}{detail}; about {duration(left)} left"


def duration(seconds: float) -> str:
    """A duration in the unit a person would use: "40 seconds", "3 minutes", "5 hours", "12 days"."""
    for unit, size, next_size in (("second", 1, 60), ("minute", 60, 3600), ("hour", 3600, 86400)):
        if seconds < 1.5 * next_size:
            return counted(max(1, round(seconds / size)), unit)
    return counted(round(seconds / 86400), "day")
