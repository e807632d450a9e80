"""The rhythm of a series: the step between bars and the market's pauses, and from it the times of future bars.

The hour and the weekday are input to the model: a bar at a wrong time is a wrong forecast. The step is the most frequent
difference; bars of whole months (on the same, the first or the last day) are counted in months. The pauses of a market are
found by `pauses.py`, which says on what evidence; where there is too little, the next bar is simply one step later. Only the
last RECENT dates that have bars count for them (RECENT_DAYS for daily bars), because markets change their hours. Files in
UTC change theirs with the exchange's summer time: `in_hours_of_today` moves what came before.

For bars of a day or more, pauses are those of whole days: their clock time may move, and no weekday is lost by that. Bars of
two to six days may keep to weekdays (Mon, Wed, Fri), and bars of weeks do: a holiday moves one of them, not those after it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.forecast.candles.pauses import (
    DAY,
    WEEK,
    WEEKDAYS,
    Pause,
    in_hours_of_today,
    joined,
    pauses_between_weekdays,
    pauses_of_the_day,
    pauses_of_the_week,
    usual_weekday,
    weekend_to_assume,
    whole_days,
)
from anytorch.forecast.candles.tables import pandas as pd
from anytorch.values import dataclass

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


FIRST_YEAR, LAST_YEAR = 1678, 2261
RECENT = 35  # dates with bars
RECENT_DAYS = 100  # for daily bars: each week says one thing about a weekday, and eight must agree


@dataclass(frozen=True)
class Rhythm:
    """How often bars come: the usual step, the share of steps that have it, and the pauses of the week."""

    step: Any  # Timedelta
    share: float
    pauses: tuple[
        Pause, ...
    ] = ()  # of the week, in order, apart from one another; the last may reach into the next week
    assumed: bool = False  # no weekend was seen; it is in `pauses` because exchanges have one
    months: int = 0  # bars of whole months have no fixed step: so many months each …
    anchor: str = ""  # … on this day: "last", "last weekday", "first weekday" or a number; of weeks, a weekday

    def __str__(self) -> str:
        if self.months:
            return counted(self.months, "month")
        return spoken(self.step, self.share, self.pauses) + (
            " (assumed: there is no weekend in the data)" if self.assumed else ""
        )


def rhythm_of(times: Any) -> Rhythm:
    """The rhythm of timestamps, at least two different ones. Raises InputError for years that cannot be counted."""
    index = pd.DatetimeIndex(times)
    _require_countable(index)
    moments = _nanoseconds(index.tz_localize(None) if index.tz is None else index.tz_convert(None))
    steps = np.diff(moments)
    if (steps <= 0).any():
        index = index.unique().sort_values()
        return rhythm_of(index)
    if len(index) < 2:
        raise InputError(
            f"{counted(len(index), 'timestamp')}: too few to find the step between bars", hint="give at least two"
        )
    if index.tz is not None:
        moments = _nanoseconds(index.tz_localize(None))
        if np.median(steps) >= 0.9 * DAY:  # when clocks change, an hour has 60 minutes, but a day has 23 hours
            steps = np.diff(moments)
    sizes, counts = np.unique(steps, return_counts=True)
    step = int(sizes[counts.argmax()])  # of several the smallest
    known = pd.Timedelta(step, "ns"), float(counts.max() / counts.sum())
    if step >= 28 * DAY and (found := _months(pd.DatetimeIndex(moments))):
        return Rhythm(*known, months=found[0], anchor=found[1])
    if step >= DAY:
        days = whole_days(moments)[-RECENT_DAYS:]
        if step % WEEK == 0:
            return Rhythm(*known, anchor=usual_weekday(days))
        if step == DAY:
            return Rhythm(*known, joined(pauses_of_the_week(days, step, [])))
        return Rhythm(*known, joined(pauses_between_weekdays(days) if step % DAY == 0 else []))
    dates = moments // DAY
    first = dates[np.flatnonzero(np.diff(dates, prepend=dates[0] - 1))][-RECENT:][0]
    # In order and each once: when clocks change, an hour may come twice.
    recent = in_hours_of_today(np.unique(moments[dates >= first]))
    nights = pauses_of_the_day(recent, step)
    weekly = pauses_of_the_week(recent, step, nights)
    assumed = weekend_to_assume(recent, nights)
    daily = [(day * DAY + after, day * DAY + until) for day in range(7) for after, until in nights]
    return Rhythm(*known, joined([*daily, *weekly, *assumed]), assumed=bool(assumed))


def _require_countable(index: Any) -> None:
    """Steps are counted in nanoseconds, of which 64 bits hold 292 years on either side of 1970; beyond, they would wrap."""
    years = index.year
    for wrong in (years.min(), years.max()) if len(index) else ():
        if not FIRST_YEAR <= wrong <= LAST_YEAR:
            raise InputError(
                f"the timestamps reach to the year {wrong}: years from {FIRST_YEAR} to {LAST_YEAR} can be used",
                hint="check the format of the timestamps",
            )


def _nanoseconds(naive: Any) -> np.ndarray:
    moments: np.ndarray = naive.to_numpy().astype("datetime64[ns]").astype("int64")
    return moments


def _months(naive: Any) -> tuple[int, str] | None:
    """Months per bar, and the day that they share."""
    number = naive.year * 12 + naive.month
    sizes, counts = np.unique(np.diff(number), return_counts=True)
    if len(naive) < 3 or sizes[0] < 1:
        return None
    usual = sizes[counts > 0.2 * counts.sum()]  # there are few: a missing bar or two may outnumber the whole ones
    ends = pd.offsets.BMonthEnd().rollforward
    starts = pd.offsets.BMonthBegin().rollback
    days = naive.normalize()
    anchor = ""
    if naive.is_month_end.all():
        anchor = "last"
    elif (naive.day == np.minimum(naive.day.max(), naive.days_in_month)).all():
        anchor = str(naive.day.max())
    elif np.mean([ends(day.replace(day=1)) == day for day in days]) > 0.8:  # a holiday moves it
        anchor = "last weekday"
    elif np.mean([starts(day.replace(day=day.days_in_month)) == day for day in days]) > 0.8:
        anchor = "first weekday"
    return (int(usual[0] if len(usual) else sizes[counts.argmax()]), anchor) if anchor else None


# --- the future ------------------------------------------------------------------------------------------------------


def future_times(times: Any, horizon: int, rhythm: Rhythm | None = None) -> pd.DatetimeIndex:
    """The `horizon` timestamps that follow the last of `times`: a step later each, and after a pause where one begins.

    The rhythm is that of `times`, or the one given: that of a longer history, of which these are the end. Pauses are learnt
    from the past (the module says from how much); holidays are not known.
    """
    index = pd.DatetimeIndex(times)
    if isinstance(horizon, bool) or not hasattr(horizon, "__index__"):
        raise InputError(f"horizon={horizon!r} is not a whole number")
    if horizon < 1:
        raise InputError(f"horizon={horizon}: use at least 1")
    rhythm = rhythm_of(index) if rhythm is None else rhythm
    try:
        return _ahead(index, horizon, rhythm)
    except (OverflowError, pd.errors.OutOfBoundsDatetime) as exc:
        raise InputError(
            f"horizon={horizon}: {horizon} bars of {rhythm} after {index[-1]} go beyond the end of the calendar",
            hint="forecast fewer bars",
        ) from exc


def _ahead(index: Any, horizon: int, rhythm: Rhythm) -> pd.DatetimeIndex:
    zone, last = index.tz, index[-1]
    if rhythm.step < pd.Timedelta(days=1):
        return pd.DatetimeIndex(_within_days(last, horizon, rhythm))
    wall = last.tz_localize(None)
    ahead = pd.DatetimeIndex(_in_months(wall, horizon, rhythm) if rhythm.months else _in_days(wall, horizon, rhythm))
    return ahead if zone is None else ahead.tz_localize(zone, nonexistent="shift_forward", ambiguous=[True] * horizon)


def _until(wall: Any, rhythm: Rhythm) -> Any:
    """The end of the pause that this moment lies in, or None."""
    monday = wall.normalize() - pd.Timedelta(days=wall.day_of_week)
    place = (wall - monday).value
    for after, until in rhythm.pauses:
        for week in (0, WEEK):
            if after < place + week < until:
                return monday + pd.Timedelta(until - week, "ns")
    return None


def _within_days(here: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    """Steps are real time, pauses are the wall clock's: a change of clocks shortens a night and no bar."""
    found = []
    for _ in range(horizon):
        ahead = here + rhythm.step
        until = _until(ahead.tz_localize(None), rhythm) if rhythm.pauses else None
        if until is not None and here.tz is not None:
            first = until.tz_localize(here.tz, nonexistent="shift_forward", ambiguous=True)
            until = first if first > here else until.tz_localize(here.tz, ambiguous=False)  # an hour that comes twice
        here = ahead if until is None else until
        found.append(here)
    return found


def _in_days(wall: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    found: list[Any] = []
    step = pd.Timedelta(days=1) if rhythm.pauses else rhythm.step  # with pauses, each day that has none has a bar
    if rhythm.anchor:  # the last week's bar may be beside its day
        wall = wall + pd.Timedelta(days=(WEEKDAYS.index(rhythm.anchor) - wall.day_of_week + 3) % 7 - 3)
    while len(found) < horizon:
        wall = wall + step
        for _ in WEEKDAYS:
            if _until(wall.normalize(), rhythm) is None:
                break
            wall = wall + step
        found.append(wall)
    return found


def _in_months(wall: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    found = []
    clock = wall - wall.normalize()
    if wall.year + rhythm.months * horizon // 12 >= 9999:  # pandas' own dates end there
        raise OverflowError
    ends = {"last": "MonthEnd", "last weekday": "BMonthEnd", "first weekday": "BMonthBegin"}
    for number in range(1, horizon + 1):
        first = wall.normalize().replace(day=1) + pd.DateOffset(months=rhythm.months * number)
        if rhythm.anchor in ends:
            day = first + getattr(pd.offsets, ends[rhythm.anchor])(0)
        else:
            day = first.replace(day=min(int(rhythm.anchor), first.days_in_month))
        found.append(day + clock)
    return found
