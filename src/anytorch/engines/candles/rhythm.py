"""How often bars come, when none come, and so the times of the bars to come.

The hour and the weekday are input to the model: a bar at a wrong time is a wrong forecast. Bars are missing in every file,
so a pause is believed only on evidence; where there is too little, the next bar is simply one step later.

1. The **step** is the most frequent difference. Bars of whole months (first, last or the same day) are counted in months.
2. A **pause of the day** (a night, a lunch break) is a stretch of the clock that has almost no bars: at most RARE times as
   many days as usual. It must have been passed on at least NIGHTS days, by gaps of about its own length, and hold EVIDENCE.
3. A **pause of the week** likewise, in bars that step 2 leaves. A weekend (Saturday and Sunday at noon inside it) must have
   been passed once; any other one WEEKS times with EVIDENCE. Days beside a weekend that were passed less often (a holiday)
   and hours beside it without evidence of their own (a few bars missing) are open.
4. A market that closes for LONG_NIGHT every night and that was seen from Monday to Friday alone, with no weekend in between,
   is **assumed** to be an exchange, which has no bars then either. `Rhythm.assumed` and its words say so.

EVIDENCE is the negative decimal logarithm of the chance that so many bars are missing in the same place by accident
(Chernoff's bound), with the share of missing bars seen elsewhere, but at least MISSING. With 10 % missing, each bar that
could have been in the pause and was not counts 1: eight hourly bars, or one break of eight five-minute bars on one day, but
a pause of the day also needs its two days. Only the last RECENT dates that have bars count: markets change their hours, and
files in UTC change theirs with the exchange's summer time.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import TYPE_CHECKING, Any

from anytorch.counts import counted
from anytorch.engines.candles.rhythm_words import DAY, WEEK, WEEKDAYS, Pause, spoken
from anytorch.errors import InputError
from anytorch.values import dataclass

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd  # type: ignore[import-untyped]

MONDAY = 4 * DAY  # of 1970's first week: that year began on a Thursday

RECENT = 35  # dates with bars
RARE = 0.3
NIGHTS, WEEKS = 2, 3
EVIDENCE = 8.0
MISSING = 0.1
LONG_NIGHT = DAY // 4
ALIKE = 1.25  # a gap is of a pause's length up to this factor, and two steps


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
    anchor: str = ""  # … on this day: "last", "last weekday", "first weekday" or a number

    def __str__(self) -> str:
        if self.months:
            return counted(self.months, "month")
        return spoken(self.step, self.share, self.pauses) + (
            " (assumed: there is no weekend in the data)" if self.assumed else ""
        )


def rhythm_of(times: Any) -> Rhythm:
    """The rhythm of timestamps; at least two different ones are needed."""
    import numpy as np
    import pandas as pd

    index = pd.DatetimeIndex(times)
    index = index if index.is_monotonic_increasing and index.is_unique else index.unique().sort_values()
    if len(index) < 2:
        raise InputError(
            f"{counted(len(index), 'timestamp')}: the step between bars cannot be told", hint="give at least two"
        )
    wall = _nanoseconds(index.tz_localize(None))
    steps = np.diff(wall if index.tz is None else _nanoseconds(index.tz_convert(None)))
    if np.median(steps) >= 0.9 * DAY:  # when clocks change, an hour has 60 minutes, but a day has 23 hours
        steps = np.diff(wall)
    sizes, counts = np.unique(steps, return_counts=True)
    step = int(sizes[counts.argmax()])  # of several the smallest
    known = pd.Timedelta(step, "ns"), float(counts.max() / counts.sum())
    moments = np.unique(wall)  # an hour may come twice
    if step >= 28 * DAY and (found := _months(pd.DatetimeIndex(wall))):
        return Rhythm(*known, months=found[0], anchor=found[1])
    if not 0 < step <= DAY:
        return Rhythm(*known)
    dates = np.unique(moments // DAY)
    recent = moments[moments >= dates[-min(RECENT, len(dates))] * DAY]
    nights = _pauses_of_the_day(recent, step) if step < DAY else []
    weekly = _pauses_of_the_week(recent, step, nights)
    assumed = _weekend_to_assume(recent, nights)
    return Rhythm(*known, _joined([*_every_day(nights), *weekly, *assumed]), assumed=bool(assumed))


def _nanoseconds(naive: Any) -> np.ndarray:
    moments: np.ndarray = naive.to_numpy().astype("datetime64[ns]").astype("int64")
    return moments


def _months(naive: Any) -> tuple[int, str] | None:
    """Months per bar, and the day that they share."""
    import numpy as np
    import pandas as pd

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


# --- pauses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passed:
    """How a stretch of the day or the week was passed: so many times without a bar, and so often with some."""

    empty: int
    filled: int
    bars: int  # in the filled ones


def _usual(moments: np.ndarray, period: int, origin: int) -> tuple[Any, float, Any]:
    """The places in the period that usually have a bar, the share of periods in which they do, and the periods."""
    import numpy as np

    turns, inside = np.divmod(moments - origin, period)
    places, bars = np.unique(inside, return_counts=True)
    alive = np.unique(turns)
    chances = len(alive) - (places < inside[0]).astype(int) - (places > inside[-1])  # the first and last are not whole
    shares = bars / chances
    usual_share = float((bars * shares).sum() / bars.sum())  # of the place of a usual bar, not of a usual place
    return places[shares > RARE * usual_share], usual_share, alive


def _stretches(usual: Any, period: int, step: int) -> Iterable[Pause]:
    """Between the usual places, around the clock, where more than a bar fits."""
    import numpy as np

    ends = np.append(usual[1:], usual[0] + period)
    for place in np.flatnonzero(ends - usual > 1.5 * step):
        yield int(usual[place]), int(ends[place])


def _passed(moments: np.ndarray, pause: Pause, begins: np.ndarray, step: int, period: int | None) -> Passed:
    """`begins` are the starts of the days or weeks. A gap counts once, and if it is about as long as the pause.

    With a `period`, whole ones of it may have gone by as well: a night that is a weekend. Without, holidays may: at Easter
    a weekend has four days.
    """
    import numpy as np

    low = np.searchsorted(moments, begins + pause[0], side="right")
    high = np.searchsorted(moments, begins + pause[1], side="left")
    within = (low > 0) & (high < len(moments))
    low, high = low[within], high[within]
    empty = np.unique(low[low == high])
    gaps = moments[empty] - moments[empty - 1]
    gaps = gaps % period if period else gaps - 2 * DAY
    alike = int((gaps <= ALIKE * (pause[1] - pause[0]) + 2 * step).sum())
    return Passed(alike, int((high > low).sum()), int((high - low).sum()))


def _evidence(chances: float, bars: int, usual_share: float) -> float:
    """-log10 of (a bound on) the chance to see so few bars where `usual_share` of the chances would have one."""
    likely = min(usual_share, 1 - MISSING)
    share = bars / chances if chances > 0 else 1.0
    if share >= likely:
        return 0.0
    distance = (1 - share) * log((1 - share) / (1 - likely)) + (share * log(share / likely) if share else 0.0)
    return chances * distance / log(10)


def _pauses_of_the_day(moments: np.ndarray, step: int) -> list[Pause]:
    usual, usual_share, days = _usual(moments, DAY, 0)
    found = []
    for pause in _stretches(usual, DAY, step):
        passed = _passed(moments, pause, days * DAY, step, DAY)
        slots = (pause[1] - pause[0]) / step - 1
        chances = slots * (passed.empty + passed.filled)
        if passed.empty >= NIGHTS and _evidence(chances, passed.bars, usual_share) >= EVIDENCE:
            found.append(pause)
    return found


def _pauses_of_the_week(moments: np.ndarray, step: int, nights: list[Pause]) -> list[Pause]:
    usual, usual_share, weeks = _usual(moments, WEEK, MONDAY)
    found = []
    for pause in _stretches(usual, WEEK, step):
        slots = _open_slots(pause[0] + step, pause[1], step, nights)
        if slots < 0.5:  # it is a night, or lunch
            continue
        passed = _passed(moments, pause, weeks * WEEK + MONDAY, step, None)
        evidence = _evidence(slots * (passed.empty + passed.filled), passed.bars, usual_share)
        weekend = _weekend_of(pause, step)
        if (weekend is not None and passed.empty) or (passed.empty >= WEEKS and evidence >= EVIDENCE):
            found.append(_trimmed(pause, weekend, passed.empty, usual_share, step, nights))
    return found


def _weekend_of(pause: Pause, step: int) -> Pause | None:
    """Saturday and Sunday, if both are in the pause: at noon, or for daily bars whole."""
    edge = DAY // 2 if step < DAY else 0
    for week in (0, WEEK):
        saturday, monday = week + 5 * DAY, week + 7 * DAY
        if pause[0] < saturday + edge and monday - edge <= pause[1]:
            return saturday, monday
    return None


def _trimmed(
    pause: Pause, weekend: Pause | None, times: int, usual_share: float, step: int, nights: list[Pause]
) -> Pause:
    """The pause without whole days beside a weekend that may be holidays, and without hours that may be missing bars."""
    start, stop = pause
    if weekend is not None and times < WEEKS:
        if start < weekend[0] - DAY:
            start = _last_bar(weekend[0], start, step, nights)
        if stop >= weekend[1] + DAY:
            stop = _first_bar(weekend[1], stop, step, nights)
    for_sure = weekend if weekend is not None else (WEEK, 0)
    midnight = -(-(start + 1) // DAY) * DAY  # after the last bar
    left = _open_slots(start + step, midnight, step, nights)
    if left > 0 and start < for_sure[0] and _evidence(left * times, 0, usual_share) < EVIDENCE:
        start = _last_bar(midnight, start, step, nights)
    midnight = stop // DAY * DAY  # before the first bar
    left = _open_slots(midnight, stop, step, nights)
    if left > 0 and stop >= for_sure[1] and _evidence(left * times, 0, usual_share) < EVIDENCE:
        stop = _first_bar(midnight, stop, step, nights)
    return start, stop


def _open_slots(start: int, stop: int, step: int, nights: list[Pause]) -> float:
    """How many bars fit between two moments of the week, nights left out."""
    length = stop - start
    for day in range(start // DAY - 1, stop // DAY + 1):
        for after, until in nights:
            length -= max(0, min(stop, day * DAY + until) - max(start, day * DAY + after + step))
    return max(0.0, length / step)


def _last_bar(midnight: int, known: int, step: int, nights: list[Pause]) -> int:
    """The last place for a bar before midnight; `known` is one on the grid."""
    for after, until in nights:
        if until > DAY:  # around midnight
            return midnight - DAY + after
    return known + (midnight - 1 - known) // step * step


def _first_bar(midnight: int, known: int, step: int, nights: list[Pause]) -> int:
    """The first place for a bar from midnight on."""
    for _, until in nights:
        if until > DAY:
            return midnight - DAY + until
    return known - (known - midnight) // step * step


def _weekend_to_assume(moments: np.ndarray, nights: list[Pause]) -> list[Pause]:
    """From Friday's last bar to Monday's first, for a market that has nights and of which no weekend was seen."""
    long = [night for night in nights if night[1] > DAY and night[1] - night[0] >= LONG_NIGHT]
    first, last = int(moments[0] - MONDAY), int(moments[-1] - MONDAY)
    same_week = first // WEEK == last // WEEK
    if not long or not same_week or last % WEEK >= 5 * DAY:
        return []
    after, until = long[0]
    return [(4 * DAY + after, WEEK - DAY + until)]


def _every_day(nights: list[Pause]) -> list[Pause]:
    return [(day * DAY + after, day * DAY + until) for day in range(7) for after, until in nights]


def _joined(pauses: list[Pause]) -> tuple[Pause, ...]:
    """In order, those that overlap as one; around the end of the week too."""
    found: list[Pause] = []
    for after, until in sorted((after % WEEK, until - after // WEEK * WEEK) for after, until in pauses):
        if found and after < found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], until)
        else:
            found.append((after, until))
    while len(found) > 1 and found[0][0] + WEEK < found[-1][1]:
        first = found.pop(0)
        found[-1] = found[-1][0], max(found[-1][1], first[1] + WEEK)
    return tuple(found)


# --- the future ------------------------------------------------------------------------------------------------------


def future_times(times: Any, horizon: int, rhythm: Rhythm | None = None) -> pd.DatetimeIndex:
    """The `horizon` timestamps that follow the last of `times`: a step later each, and after a pause where one begins.

    The rhythm is that of `times`, or the one given: that of a longer history, of which these are the end. Pauses are learnt
    from the past (the module says from how much); holidays are not known.
    """
    import pandas as pd

    index = pd.DatetimeIndex(times)
    if horizon < 1:
        raise InputError(f"horizon={horizon}: forecast at least one bar")
    rhythm = rhythm_of(index) if rhythm is None else rhythm
    zone, last = index.tz, index[-1]
    if rhythm.step < pd.Timedelta(days=1):
        return pd.DatetimeIndex(_within_days(last, horizon, rhythm))
    wall = last.tz_localize(None)
    ahead = pd.DatetimeIndex(_in_months(wall, horizon, rhythm) if rhythm.months else _in_days(wall, horizon, rhythm))
    return ahead if zone is None else ahead.tz_localize(zone, nonexistent="shift_forward", ambiguous=[True] * horizon)


def _until(wall: Any, rhythm: Rhythm) -> Any:
    """The end of the pause that this moment lies in, or None."""
    import pandas as pd

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
            until = until.tz_localize(here.tz, nonexistent="shift_forward", ambiguous=True)
        here = ahead if until is None else until
        found.append(here)
    return found


def _in_days(wall: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    found: list[Any] = []
    while len(found) < horizon:
        wall = wall + rhythm.step
        for _ in WEEKDAYS:
            if _until(wall, rhythm) is None:
                break
            wall = wall + rhythm.step
        found.append(wall)
    return found


def _in_months(wall: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    import pandas as pd

    found = []
    clock = wall - wall.normalize()
    for number in range(1, horizon + 1):
        first = wall.normalize().replace(day=1) + pd.DateOffset(months=rhythm.months * number)
        if rhythm.anchor == "last":
            day = first + pd.offsets.MonthEnd(0)
        elif rhythm.anchor == "last weekday":
            day = first + pd.offsets.BMonthEnd(0)
        elif rhythm.anchor == "first weekday":
            day = first + pd.offsets.BMonthBegin(0)
        else:
            day = first.replace(day=min(int(rhythm.anchor), first.days_in_month))
        found.append(day + clock)
    return found
