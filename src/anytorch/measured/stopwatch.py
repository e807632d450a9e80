"""How work is timed: the seconds of a call by the best clock there is, and which accidents say nothing about another day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

Run = Callable[[], Any]


def by_wall(synchronize: Callable[[], object], now: Callable[[], float] = perf_counter) -> Callable[[Run, int], float]:
    """(run, count) → seconds of one of `count` calls, by the wall clock, with the device done before and after."""

    def seconds(run: Run, count: int) -> float:
        synchronize()
        begun = now()
        for _ in range(count):
            run()
        synchronize()
        return (now() - begun) / count

    return seconds


_HOST = by_wall(lambda: None)


@dataclass(frozen=True)
class Stopwatch:
    """`seconds(run, count)` gives the seconds of one call; `now` is the wall clock that bounds a whole measurement.

    `is_passing(exception)`: is it an accident of this moment, such as a lack of memory? Such a verdict is not stored.
    """

    seconds: Callable[[Run, int], float] = _HOST
    is_passing: Callable[[Exception], bool] = lambda exc: isinstance(exc, MemoryError)
    now: Callable[[], float] = perf_counter


def count_interruptions() -> int:
    """How often the system has taken a processor away from this process; always 0 where it does not tell (Windows)."""
    try:
        import resource
    except ModuleNotFoundError:
        return 0
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)
