"""A rhythm in words: "5 minutes (99% of the steps), 09:30 to 11:25 and 13:00 to 14:55, Mon to Fri"."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from anytorch.counts import counted

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY = 86_400 * 10**9  # all sums are in nanoseconds of the clock on the wall
WEEK = 7 * DAY
Pause = tuple[
    int, int
]  # after a bar at the first moment the next one is at the second: since midnight, or since Monday
MOST = 3  # stretches that are listed


def duration(step: Any) -> str:
    """ "5 minutes", "1 day"."""
    seconds = step.total_seconds()
    for unit, size in (("week", 604800), ("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= size and seconds % size == 0:
            return counted(int(seconds // size), unit)
    return f"{seconds:g} seconds"


def spoken(step: Any, share: float, pauses: tuple[Pause, ...]) -> str:
    # 99.95 % is not "100 %": somebody looks for the bar that is missing.
    nearly = 0.995 <= share < 1.0
    words = f"{duration(step)} ({f'{min(share, 0.999):.1%}' if nearly else f'{share:.0%}'} of the steps)"
    if not pauses:
        return words
    return f"{words}, {_hours(_open(pauses), daily=step.total_seconds() >= 86400)}"


def _open(pauses: tuple[Pause, ...]) -> list[Pause]:
    """The stretches between the pauses: first and last bar, since Monday."""
    ends = [*pauses, (pauses[0][0] + WEEK, 0)]
    found = [(before[1], after[0]) for before, after in pairwise(ends)]
    return sorted((first % WEEK, last - first // WEEK * WEEK) for first, last in found)


def _hours(stretches: list[Pause], *, daily: bool) -> str:
    if daily:
        days = sorted({place // DAY % 7 for first, last in stretches for place in range(first, last + 1, DAY)})
        return _days(days)
    if any(last - first >= DAY for first, last in stretches):
        told = [f"{_moment(first)} to {_moment(last)}" for first, last in stretches[:MOST]]
        return "; ".join(told) + ("; …" if len(stretches) > MOST else "")
    by_day: dict[int, list[str]] = {}
    for first, last in stretches:
        by_day.setdefault(first // DAY, []).append(f"{_clock(first)} to {_clock(last)}")
    alike: dict[str, list[int]] = {}
    for day, hours in by_day.items():
        more = " and …" if len(hours) > MOST else ""
        alike.setdefault(" and ".join(hours[:MOST]) + more, []).append(day)
    return "; ".join(
        hours if len(days) == 7 else f"{hours}, {_days(days)}" for hours, days in list(alike.items())[:MOST]
    ) + ("; …" if len(alike) > MOST else "")


def _clock(place: int) -> str:
    minutes, rest = divmod(place % DAY // 10**9, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}" + (f":{rest:02d}" if rest else "")


def _moment(place: int) -> str:
    return f"{WEEKDAYS[place // DAY % 7]} {_clock(place)}"


def _days(days: list[int]) -> str:
    """ "Mon to Fri", "Sun to Thu", "Mon, Wed"; of one run around the week its ends."""
    for shift in range(7):
        turned = sorted((day - shift) % 7 for day in days)
        if len(days) > 2 and turned == list(range(len(days))):
            return f"{WEEKDAYS[shift]} to {WEEKDAYS[(shift + len(days) - 1) % 7]}"
    return ", ".join(WEEKDAYS[day] for day in days)
