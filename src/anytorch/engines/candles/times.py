"""Timestamps: read from whatever a file holds, their rhythm, and the ones that come next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.values import dataclass

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

# Epochs by size: seconds of the years 1973 to 2100, and their thousandths.
EPOCHS = ((1e8, 4.2e9, "s"), (1e11, 4.2e12, "ms"), (1e14, 4.2e15, "us"), (1e17, 4.2e18, "ns"))
DIGITS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
ZONE = re.compile(r"[\d:.]\s*(Z|UTC|[+-]\d{2}:?\d{2})$")
OTHER_FORMATS = tuple(
    f"{date}{time}"
    for date in ("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%m-%d-%Y", "%b %d, %Y", "%d %b %Y", "%d-%b-%Y")
    for time in ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
)
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def parse_times(values: Any, lines: Sequence[int], column: str, where: str) -> tuple[pd.Series, list[str]]:
    """A column as datetimes, and what had to be guessed. Raises InputError with the first line that is no time."""
    import numpy as np
    import pandas as pd

    values = pd.Series(values).reset_index(drop=True)
    if pd.api.types.is_datetime64_any_dtype(values):
        return values, []
    numbers = pd.to_numeric(values, errors="coerce")
    if numbers.notna().all() and len(values):
        return _from_numbers(numbers, values, lines, column, where)
    text = values.astype(str).str.strip()
    empty = np.flatnonzero((text == "") | values.isna() | text.str.lower().isin(["nan", "nat", "none", "null"]))
    if len(empty):
        raise _at(where, lines[empty[0]], column, "there is no timestamp")
    zones = text.str.extract(ZONE, expand=False)
    aware = zones.notna().to_numpy()
    if aware.any() and not aware.all():
        bare, marked = int(np.flatnonzero(~aware)[0]), int(np.flatnonzero(aware)[0])
        raise _at(
            where,
            lines[max(bare, marked)],
            column,
            f"some timestamps name a time zone and others do not: {text[marked]!r} (line {lines[marked]}) and "
            f"{text[bare]!r} (line {lines[bare]})",
            hint="write all of them with a zone, or none",
        )
    notes = []
    if aware.any() and zones.nunique() > 1:
        notes.append("the timestamps have several UTC offsets; they are read as UTC (--timezone converts them)")
    try:
        parsed = pd.to_datetime(text, format="ISO8601", utc=bool(aware.any() and zones.nunique() > 1))
    except (ValueError, OverflowError):
        parsed = None
    if parsed is None:
        parsed, words = _other_formats(text, lines, column, where)
        notes.append(words)
    return parsed, notes


def _from_numbers(
    numbers: Any, values: Any, lines: Sequence[int], column: str, where: str
) -> tuple[pd.Series, list[str]]:
    import numpy as np
    import pandas as pd

    digits = values.astype(str).str.strip().str.removesuffix(".0")
    for length, layout in DIGITS.items():
        if (digits.str.len() == length).all():
            parsed = pd.to_datetime(digits, format=layout, errors="coerce")
            if parsed.notna().all():
                return parsed, [f"timestamps such as {digits[0]} are read as {_words(layout)}"]
    for low, high, unit in EPOCHS:
        if ((numbers >= low) & (numbers < high)).all():
            parsed = pd.to_datetime(numbers.round().astype("int64"), unit=unit)
            return parsed, [f"timestamps such as {digits[0]} are read as {_words(unit)} since 1970 in UTC"]
    fits = np.zeros(len(numbers), bool)
    for low, high, _ in EPOCHS:
        if low <= numbers[0] < high:
            fits = ((numbers >= low) & (numbers < high)).to_numpy()
    bad = int(np.flatnonzero(~fits)[0])
    raise _at(
        where,
        lines[bad],
        column,
        f"{digits[bad]!r} is no date",
        hint="write 2024-01-31 09:30:00, or an epoch in s or ms",
    )


def _other_formats(text: Any, lines: Sequence[int], column: str, where: str) -> tuple[Any, str]:
    """The written-out formats. Where 03/04 could be either, the order that makes time run forwards wins."""
    import numpy as np
    import pandas as pd

    fitting = []
    as_iso = pd.to_datetime(text, format="ISO8601", errors="coerce").isna()
    furthest = int(np.flatnonzero(as_iso)[0]) if as_iso.any() else 0  # the first line that no format can read
    for layout in OTHER_FORMATS:
        parsed = pd.to_datetime(text, format=layout, errors="coerce")
        if parsed.notna().all():
            fitting.append((layout, parsed))
        else:
            furthest = max(furthest, int(np.flatnonzero(parsed.isna())[0]))
    if not fitting:
        raise _at(
            where,
            lines[furthest],
            column,
            f"{text[furthest]!r} is no date we can read",
            hint="write 2024-01-31 09:30:00, or an epoch in s or ms",
        )

    def disorder(entry: tuple[str, Any]) -> tuple[bool, float]:
        steps = entry[1].diff().dropna().dt.total_seconds()
        backwards = not ((steps >= 0).all() or (steps <= 0).all())
        return backwards, float(steps.abs().median()) if len(steps) else 0.0

    layout, parsed = min(fitting, key=disorder)
    ambiguous = len({entry[0][:5] for entry in fitting}) > 1
    doubt = "; day and month could be swapped, and this order makes time run evenly" if ambiguous else ""
    return parsed, f"timestamps such as {text[0]!r} are read as {_words(layout)}{doubt}"


def _words(layout: str) -> str:
    units = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    if layout in units:
        return units[layout]
    for code, word in (
        *(("%Y", "YYYY"), ("%m", "MM"), ("%d", "DD"), ("%H", "hh"), ("%I", "hh"), ("%M", "mm"), ("%S", "ss")),
        *(("%p", "AM/PM"), ("%b", "Mon")),
    ):
        layout = layout.replace(code, word)
    return layout


def _at(where: str, line: int, column: str, words: str, hint: str = "") -> InputError:
    return InputError(f"{where}, line {line}, column {column!r}: {words}", hint=hint)


# --- rhythm ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rhythm:
    """How often bars come: the usual step, the share of steps that have it, and when there are bars at all."""

    step: Any  # Timedelta
    share: float
    slots: tuple[Any, ...]  # times of day (Timedelta), for bars within the day that pause at night; else ()
    weekdays: tuple[int, ...]  # Monday is 0
    months: int = 0  # bars of whole months have no fixed step: so many months each …
    month_ends: bool = False  # … and on the last day

    def __str__(self) -> str:
        words = f"{duration(self.step)} ({self.share:.0%} of the steps)"
        if self.months:
            words = counted(self.months, "month")
        if self.slots:
            first, last = (str(slot).split()[-1][:5] for slot in (self.slots[0], self.slots[-1]))
            words += f", {first} to {last}"
        if len(self.weekdays) < 7:
            words += f", {', '.join(WEEKDAYS[day] for day in self.weekdays)}"
        return words


def duration(step: Any) -> str:
    """ "5 minutes", "1 day"."""
    seconds = step.total_seconds()
    for unit, size in (("week", 604800), ("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= size and seconds % size == 0:
            return counted(int(seconds // size), unit)
    return f"{seconds:g} seconds"


def rhythm_of(times: Any) -> Rhythm:
    """The rhythm of sorted, distinct timestamps; at least two are needed."""
    import numpy as np
    import pandas as pd

    index = pd.DatetimeIndex(times)
    if len(index) < 2:
        raise InputError(
            f"{counted(len(index), 'timestamp')}: the step between bars cannot be told", hint="give at least two"
        )
    naive = index.tz_localize(None) if index.tz is not None else index
    steps = pd.Series(np.diff(naive.to_numpy()))
    counts = steps.value_counts()
    step = pd.Timedelta(counts[counts == counts.max()].index.min())
    share = float(counts.max() / len(steps))
    months = round(step.days / 30.44)
    if (
        months
        and len(naive) >= 3
        and steps.between(pd.Timedelta(days=28 * months), pd.Timedelta(days=31 * months)).all()
    ):
        if naive.is_month_end.all():
            return Rhythm(step, share, (), tuple(range(7)), months, month_ends=True)
        if naive.day.nunique() == 1:
            return Rhythm(step, share, (), tuple(range(7)), months)
    if share == 1.0:  # no pause anywhere: as far as anybody can see there is none
        return Rhythm(step, share, (), tuple(range(7)))
    slots = _slots(naive, step) if step < pd.Timedelta(days=1) else ()
    return Rhythm(step, share, slots, _weekdays(naive))


def _weekdays(naive: Any) -> tuple[int, ...]:
    """The days of the week that have bars: not those of which there is an odd one (a Saturday's test session)."""
    import numpy as np

    days = naive.normalize().unique()
    if len(days) < 6:  # not enough days to miss one
        seen = {int(day) for day in days.day_of_week}
        return tuple(range(7)) if seen & {5, 6} else tuple(range(5)) if len(days) > 1 else tuple(range(7))
    counts = np.bincount(days.day_of_week, minlength=7)
    return tuple(int(day) for day in np.flatnonzero(counts > 0.1 * counts.max()))


def _slots(naive: Any, step: Any) -> tuple[Any, ...]:
    """The times of day that usually have a bar; () when there is no pause in the day to speak of."""
    import pandas as pd

    inside = pd.Series(naive - naive.normalize())
    counts = inside.value_counts()
    usual = sorted(counts[counts >= 0.3 * counts.max()].index)
    whole_day = pd.Timedelta(days=1) / step
    return () if len(usual) > 0.95 * whole_day else tuple(pd.Timedelta(slot) for slot in usual)


def future_times(times: Any, horizon: int) -> pd.DatetimeIndex:
    """The `horizon` timestamps that follow, in the rhythm of the past: its step, its hours, its days of the week.

    Nights and weekends are learnt from the history, holidays are not known.
    """
    import pandas as pd

    index = pd.DatetimeIndex(times)
    if horizon < 1:
        raise InputError(f"horizon={horizon}: forecast at least one bar")
    rhythm = rhythm_of(index)
    zone = index.tz
    last = index[-1].tz_localize(None) if zone is not None else index[-1]
    if rhythm.months:
        ahead = pd.DatetimeIndex([last + pd.DateOffset(months=rhythm.months * (n + 1)) for n in range(horizon)])
        ahead = ahead + pd.offsets.MonthEnd(0) if rhythm.month_ends else ahead
    elif rhythm.slots:
        ahead = pd.DatetimeIndex(_next_slots(last, horizon, rhythm))
    elif len(rhythm.weekdays) < 7 and rhythm.step <= pd.Timedelta(days=1):
        ahead = pd.DatetimeIndex(_next_days(last, horizon, rhythm))
    else:
        ahead = pd.DatetimeIndex([last + rhythm.step * (n + 1) for n in range(horizon)])
    if zone is None:
        return ahead
    # An hour that the clocks skip moves on; one that comes twice is taken the first time.
    return ahead.tz_localize(zone, nonexistent="shift_forward", ambiguous=[True] * len(ahead))


def _next_slots(last: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    import pandas as pd

    found: list[Any] = []
    day = last.normalize()
    while len(found) < horizon:
        if day.day_of_week in rhythm.weekdays:
            found += [day + slot for slot in rhythm.slots if day + slot > last]
        day += pd.Timedelta(days=1)
    return found[:horizon]


def _next_days(last: Any, horizon: int, rhythm: Rhythm) -> list[Any]:
    found: list[Any] = []
    here = last
    while len(found) < horizon:
        here = here + rhythm.step
        if here.day_of_week in rhythm.weekdays:
            found.append(here)
    return found
