"""When a market has no bars: the pauses of its day and its week, believed only on evidence, because bars are missing anyway.

1. A **pause of the day** (a night, a lunch break) is a stretch of the clock that has almost no bars: at most RARE times as
   many days as usual. It must have been passed on at least NIGHTS days, by gaps of about its own length, and hold EVIDENCE.
2. A **pause of the week** likewise, in the bars that step 1 leaves. A weekend (Saturday and Sunday at noon inside it) must
   have been passed once; any other one WEEKS times with EVIDENCE, of which a Saturday or a Sunday alone, in daily bars,
   needs half: markets often close then. What lies at its ends must have EVIDENCE of its own, and whole days beside a
   weekend must also have been passed WEEKS times: they may be holidays. Half the evidence is enough for hours beside a
   weekend if AGREED weekends or more were passed and none had a bar there; where no bar is missing elsewhere (LEAST_MISSING
   is assumed), one bar on two Fridays is that much.
3. A market that closes for LONG_NIGHT every night and that was seen from Monday to Friday alone, with no weekend in between,
   is **assumed** to be an exchange, which has no bars then either.

EVIDENCE is the negative decimal logarithm of the chance that so few bars are in one place by accident (Chernoff's bound),
with the share of missing bars seen elsewhere, but at least MISSING. With 10 % missing, each bar that could have been in the
pause and was not counts 1: eight hours of hourly bars together, or a break of four five-minute bars on two days.

When an exchange changes its clocks, all of its bars in UTC move by an hour, and no bar is missing or new. With a time zone
(`--timezone`) that does not show. Without one the past is moved to where the last days are: the weekends and lunch breaks
of before are still evidence, which they would not be if only the days since the change were kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import Any

import numpy as np

from anytorch.values import dataclass

WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY = 86_400 * 10**9  # all sums are in nanoseconds of the clock on the wall
WEEK = 7 * DAY
# After a bar at the first moment the next one is at the second: since midnight, or since Monday.
Pause = tuple[int, int]
HOUR = DAY // 24
LAST, AGREE = 5, 3  # of so many last dates so many must have the same hours: one day may open and close an hour late


def whole_days(moments: np.ndarray) -> np.ndarray:
    """Midnight of each daily bar's date, each once.

    Where clocks changed around midnight (London's days in UTC begin at 00:00 and then at 23:00), the dates are those that
    the bars would have with the last one's clock time.
    """
    moved = (moments - moments[-1] + DAY // 2) % DAY - DAY // 2
    return np.unique(np.where(abs(moved) == HOUR, moments - moved, moments) // DAY * DAY)


def in_hours_of_today(moments: np.ndarray) -> np.ndarray:
    """The same bars, those before the last change of clocks moved to the hours after it.

    A change is seen where the first and the last bar of the dates before lie elsewhere by the same time, on most of them.
    """
    dates = moments // DAY
    begins = np.flatnonzero(np.diff(dates, prepend=dates[0] - 1))
    first, last = moments[begins] % DAY, moments[np.append(begins[1:], len(moments)) - 1] % DAY
    hours, counts = np.unique(np.stack([first, last], axis=1)[-LAST:], axis=0, return_counts=True)
    if counts.max() < AGREE:
        return moments
    today = hours[counts.argmax()]
    moved = np.where(first - today[0] == last - today[1], first - today[0], 0)
    if not moved.any():
        return moments
    change = int(np.flatnonzero(moved)[-1]) + 1  # the dates before this one have other hours
    shift = moved[change - 1]
    new = (first[change:] == today[0]) & (last[change:] == today[1])
    if change < AGREE or (moved[:change] == shift).sum() <= change / 2 or new.sum() < AGREE:
        return moments
    before = dates < dates[begins[change]]
    return np.unique(np.where(before, moments - shift, moments))


MONDAY = 4 * DAY  # of 1970's first week: that year began on a Thursday

RARE = 0.3
NIGHTS, WEEKS = 2, 3
EVIDENCE = 8.0
MISSING = 0.1
AGREED = 2
LEAST_MISSING = 0.01
LONG_NIGHT = DAY // 4
ALIKE = 1.25  # a gap is of a pause's length up to this factor, and two steps


@dataclass(frozen=True)
class Passed:
    """How often a stretch of the day or the week had no bar, and how often it had some."""

    empty: int
    filled: int
    bars: int  # in the filled ones


def _usual(moments: np.ndarray, period: int, origin: int) -> tuple[Any, float, Any]:
    """The places in the period that usually have a bar, the share of periods in which they do, and the periods."""
    turns, inside = np.divmod(moments - origin, period)
    places, bars = np.unique(inside, return_counts=True)
    alive = np.unique(turns)
    chances = len(alive) - (places < inside[0]).astype(int) - (places > inside[-1])  # the first and last are not whole
    # Of a bar's place, how often there is one in the other periods: with its own it would look better than it is.
    others = (bars * (chances - 1)).sum()
    usual_share = float((bars * (bars - 1)).sum() / others) if others else 1.0
    return places[bars / chances > RARE * usual_share], usual_share, alive


def _stretches(usual: Any, period: int, step: int) -> Iterable[Pause]:
    """Between the usual places, around the clock, where more than a bar fits."""
    ends = np.append(usual[1:], usual[0] + period)
    for place in np.flatnonzero(ends - usual > 1.5 * step):
        yield int(usual[place]), int(ends[place])


def _passed(moments: np.ndarray, pause: Pause, begins: np.ndarray, step: int, period: int | None) -> Passed:
    """`begins` are the starts of the days or weeks. A gap counts once, and if it is about as long as the pause.

    With a `period`, whole ones of it may have gone by as well: a night that is a weekend. Without, holidays may: at Easter
    a weekend has four days.
    """
    low = np.searchsorted(moments, begins + pause[0], side="right")
    high = np.searchsorted(moments, begins + pause[1], side="left")
    within = (low > 0) & (high < len(moments))
    low, high = low[within], high[within]
    empty = np.unique(low[low == high])
    gaps = moments[empty] - moments[empty - 1]
    gaps = gaps % period if period else gaps - 2 * DAY
    alike = int((gaps <= ALIKE * (pause[1] - pause[0]) + 2 * step).sum())
    return Passed(alike, int((high > low).sum()), int((high - low).sum()))


def _evidence(chances: float, bars: int, usual_share: float, missing: float = MISSING) -> float:
    """-log10 of (a bound on) the chance to see so few bars where `usual_share` of the chances would have one."""
    likely = min(usual_share, 1 - missing)
    share = bars / chances if chances > 0 else 1.0
    if share >= likely:
        return 0.0
    distance = (1 - share) * log((1 - share) / (1 - likely)) + (share * log(share / likely) if share else 0.0)
    return chances * distance / log(10)


def pauses_of_the_day(moments: np.ndarray, step: int) -> list[Pause]:
    usual, usual_share, days = _usual(moments, DAY, 0)
    found = []
    for pause in _stretches(usual, DAY, step):
        passed = _passed(moments, pause, days * DAY, step, DAY)
        slots = (pause[1] - pause[0]) / step - 1
        chances = slots * (passed.empty + passed.filled)
        if passed.empty >= NIGHTS and _evidence(chances, passed.bars, usual_share) >= EVIDENCE:
            found.append(pause)
    return found


def pauses_of_the_week(moments: np.ndarray, step: int, nights: list[Pause]) -> list[Pause]:
    usual, usual_share, weeks = _usual(moments, WEEK, MONDAY)
    found = []
    for pause in _stretches(usual, WEEK, step):
        slots = _open_slots(pause[0] + step, pause[1], step, nights)
        if slots < 0.5:  # it is a night, or lunch
            continue
        passed = _passed(moments, pause, weeks * WEEK + MONDAY, step, None)
        evidence = _evidence(slots * (passed.empty + passed.filled), passed.bars, usual_share)
        weekend = _weekend_of(pause, step)
        half_weekend = step == DAY and pause[0] >= 4 * DAY and pause[1] <= WEEK
        enough = EVIDENCE / 2 if half_weekend else EVIDENCE
        if (weekend is not None and passed.empty) or (passed.empty >= WEEKS and evidence >= enough):
            found.append(_trimmed(pause, weekend, passed, usual_share, step, nights))
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
    pause: Pause, weekend: Pause | None, passed: Passed, usual_share: float, step: int, nights: list[Pause]
) -> Pause:
    """The pause without what lies at its ends and has no evidence of its own.

    That is what lies beside the weekend; in any other pause, the hours of the days on which it begins and ends.
    """
    start, stop = pause
    times = passed.empty
    agreed = weekend is not None and times >= AGREED and not passed.bars
    first, last = weekend if weekend is not None else (start // DAY * DAY + DAY, stop // DAY * DAY)

    def kept(slots: float, length: int) -> bool:
        whole_days = length > DAY  # holidays: as many weeks are needed as for days elsewhere in the week
        if slots <= 0 or (whole_days and times < WEEKS):
            return slots <= 0
        return _evidence(slots * times, 0, usual_share) >= EVIDENCE or (
            agreed and not whole_days and _evidence(slots * times, 0, usual_share, LEAST_MISSING) >= EVIDENCE / 2
        )

    # The last place for a bar before the first midnight, and the first one from the last midnight on: beside the night
    # around it, else on the grid.
    around = next((night for night in nights if night[1] > DAY), None)
    if not kept(_open_slots(start + step, first, step, nights), first - start):
        start = first - DAY + around[0] if around else start + (first - 1 - start) // step * step
    if not kept(_open_slots(last, stop, step, nights), stop - last):
        stop = last - DAY + around[1] if around else stop - (stop - last) // step * step
    return start, stop


def _open_slots(start: int, stop: int, step: int, nights: list[Pause]) -> float:
    """How many bars fit between two moments of the week, nights left out."""
    length = stop - start
    for day in range(start // DAY - 1, stop // DAY + 1):
        for after, until in nights:
            length -= max(0, min(stop, day * DAY + until) - max(start, day * DAY + after + step))
    return max(0.0, length / step)


def weekend_to_assume(moments: np.ndarray, nights: list[Pause]) -> list[Pause]:
    """From Friday's last bar to Monday's first, for a market that has nights and of which no weekend was seen."""
    long = [night for night in nights if night[1] > DAY and night[1] - night[0] >= LONG_NIGHT]
    first, last = int(moments[0] - MONDAY), int(moments[-1] - MONDAY)
    same_week = first // WEEK == last // WEEK
    if not long or not same_week or last % WEEK >= 5 * DAY:
        return []
    after, until = long[0]
    return [(4 * DAY + after, WEEK - DAY + until)]


def usual_weekday(days: np.ndarray) -> str:
    """The weekday of more than half the bars, or none."""
    counts = np.bincount((days - MONDAY) % WEEK // DAY, minlength=7)
    return WEEKDAYS[counts.argmax()] if counts.max() > len(days) / 2 else ""


def pauses_between_weekdays(days: np.ndarray) -> list[Pause]:
    """Of bars of two to six days that keep to weekdays: all there is between these.

    A step of so many days goes through all seven weekdays in as many weeks, so weekdays that were met WEEKS times, while
    others hardly were, are no accident.
    """
    counts = np.bincount((days - MONDAY) % WEEK // DAY, minlength=7)
    usual = np.flatnonzero((counts >= WEEKS) & (counts > RARE * counts.max()))
    if not 0 < len(usual) < 7 or counts[usual].sum() < (1 - MISSING) * len(days):
        return []
    return list(_stretches(usual * DAY, WEEK, DAY))


def joined(pauses: list[Pause]) -> tuple[Pause, ...]:
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
