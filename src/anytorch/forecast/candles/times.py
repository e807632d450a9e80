"""Read timestamps in any common format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from anytorch.errors import InputError
from anytorch.forecast.candles.tables import Cells, Origin, shown
from anytorch.forecast.candles.tables import pandas as pd

# Epochs by size: seconds of the years 1973 to 2100, and their thousandths.
EPOCHS = ((1e8, 4.2e9, "s"), (1e11, 4.2e12, "ms"), (1e14, 4.2e15, "us"), (1e17, 4.2e18, "ns"))
DIGITS = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
EMPTY = "fill it in, or remove that row"
WRITE = "write 2024-01-31 09:30:00, or an epoch in s or ms"
WORDS = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "%Y": "YYYY",
    "%y": "YY",
    "%m": "MM",
    "%d": "DD",
    "%H": "hh",
    "%I": "hh",
    "%M": "mm",
    "%S": "ss",
    "%p": "AM/PM",
    "%b": "Mon",
}
ZONE = re.compile(r"[\d:.]\s*(Z|UTC|[+-]\d{2}:?\d{2})$")
OTHER_FORMATS = tuple(
    f"{date}{time}"
    for date in (
        *("%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%m-%d-%Y", "%b %d, %Y", "%d %b %Y", "%d-%b-%Y"),
        *("%d/%m/%y", "%m/%d/%y", "%d.%m.%y"),
    )
    for time in ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
)


def parse_times(
    values: Any, lines: Sequence[int], column: str, where: Origin | str, *, zoned: bool = False
) -> tuple[pd.Series, list[str]]:
    """A column as datetimes, and notes on guesses. Raises InputError with the first line that is not a time.

    `zoned`: epochs, which are moments in UTC, come out as such; else as what clocks in UTC show, as in most files.
    """
    cells = Cells(lines, column, source := Origin.of(where))
    values = pd.Series(values).reset_index(drop=True)
    if pd.api.types.is_datetime64_any_dtype(values):
        if values.hasnans:
            raise cells.refused(int(np.flatnonzero(values.isna())[0]), "the timestamp is missing", hint=EMPTY)
        return values, []
    numbers = pd.to_numeric(values, errors="coerce")
    if numbers.notna().all() and len(values):
        return _from_numbers(numbers, values, cells, zoned)
    text = values.astype(str).str.strip()
    empty = np.flatnonzero((text == "") | values.isna() | text.str.lower().isin(["nan", "nat", "none", "null"]))
    if len(empty):
        raise cells.refused(empty[0], "the timestamp is missing", hint=EMPTY)
    zones = text.str.extract(ZONE, expand=False)
    aware = zones.notna().to_numpy()
    if aware.any() and not aware.all():
        bare, marked = int(np.flatnonzero(~aware)[0]), int(np.flatnonzero(aware)[0])
        raise cells.refused(
            max(bare, marked),
            f"some timestamps name a time zone and others do not: {shown(text[marked])} ({source.unit} {lines[marked]}) "
            f"and {shown(text[bare])} ({source.unit} {lines[bare]})",
            hint="write all of them with a zone, or none",
        )
    notes = []
    if aware.any() and zones.nunique() > 1:
        read_as = "" if zoned else f"; they are read as UTC ({source.zone_option} converts them)"
        notes.append(f"the timestamps have several UTC offsets{read_as}")
    try:
        parsed = pd.to_datetime(text, format="ISO8601", utc=bool(aware.any() and zones.nunique() > 1))
    except (ValueError, OverflowError):
        parsed, words = _other_formats(text, cells)
        notes.append(words)
    return parsed, notes


def _from_numbers(numbers: Any, values: Any, cells: Cells, zoned: bool) -> tuple[pd.Series, list[str]]:
    digits = values.astype(str).str.strip().str.removesuffix(".0")
    for length, layout in DIGITS.items():
        if (digits.str.len() == length).all():
            parsed = pd.to_datetime(digits, format=layout, errors="coerce")
            if parsed.notna().all():
                return parsed, [f"timestamps such as {digits[0][:40]} are read as {_words(layout)}"]
    for low, high, unit in EPOCHS:
        if ((numbers >= low) & (numbers < high)).all():
            parsed = pd.to_datetime(numbers.round().astype("int64"), unit=unit, utc=zoned)
            return parsed, [f"timestamps such as {digits[0][:40]} are read as {_words(unit)} since 1970 in UTC"]
    fits = np.zeros(len(numbers), bool)
    for low, high, _ in EPOCHS:
        if low <= numbers[0] < high:
            fits = ((numbers >= low) & (numbers < high)).to_numpy()
    bad = int(np.flatnonzero(~fits)[0])
    raise cells.refused(bad, f"{shown(digits[bad])} is not a date", hint=WRITE)


def _other_formats(text: Any, cells: Cells) -> tuple[Any, str]:
    """The written-out formats. Where 03/04 could be either, the order that makes time run forwards wins."""
    fitting = []
    as_iso = pd.to_datetime(text, format="ISO8601", errors="coerce").isna()
    furthest = int(np.flatnonzero(as_iso)[0]) if as_iso.any() else 0  # the first line that no format can read
    for layout in OTHER_FORMATS:
        first = pd.to_datetime(text[:20], format=layout, errors="coerce")  # most are wrong, and that is soon seen
        parsed = pd.to_datetime(text, format=layout, errors="coerce") if first.notna().all() else first
        if parsed.notna().all():
            fitting.append((layout, parsed))
        else:
            furthest = max(furthest, int(np.flatnonzero(parsed.isna())[0]))
    if not fitting:
        raise cells.refused(furthest, f"{shown(text[furthest])} is not a known date format", hint=WRITE)

    def disorder(entry: tuple[str, Any]) -> tuple[bool, float, bool]:
        layout, parsed = entry
        steps = parsed.diff().dropna().dt.total_seconds()
        backwards = not ((steps >= 0).all() or (steps <= 0).all())
        foreign = layout.startswith("%m") != ("%p" in layout)  # files with AM and PM have the month first
        return backwards, float(steps.abs().median()) if len(steps) else 0.0, foreign

    layout, parsed = min(fitting, key=disorder)
    ambiguous = len({entry[0][:5] for entry in fitting}) > 1
    doubt = "; day and month could be swapped, and this order makes time run evenly" if ambiguous else ""
    return parsed, f"timestamps such as {shown(text[0])} are read as {_words(layout)}{doubt}"


def _words(layout: str) -> str:
    """A unit or a format as people write it."""
    return WORDS.get(layout) or re.sub(r"%\w", lambda code: WORDS[code[0]], layout)


def in_zone(times: Any, timezone: str | None, lines: Sequence[int], column: str, where: Origin | str) -> Any:
    """The times in this zone: converted where they have one, else taken to be what its clocks show."""
    if timezone is None:
        return times
    cells = Cells(lines, column, source := Origin.of(where))
    if not timezone.strip():
        raise InputError(f"unknown time zone {timezone!r}", hint="write a name such as Europe/Berlin or UTC")
    try:
        empty = times[:0]
        (empty.dt.tz_localize if times.dt.tz is None else empty.dt.tz_convert)(timezone)
    # An unknown zone; a name that is no name, which reaches the file system.
    except (LookupError, ValueError, TypeError, OSError, ModuleNotFoundError) as exc:
        raise InputError(f"timezone {timezone!r}: {exc}", hint="write a name such as Europe/Berlin or UTC") from exc
    if times.dt.tz is not None:
        return times.dt.tz_convert(timezone)
    local = times.dt.tz_localize(timezone, nonexistent="NaT", ambiguous=np.ones(len(times), bool))
    if local.hasnans:
        row = int(np.flatnonzero(local.isna())[0])
        raise cells.refused(
            row,
            f"{times.iloc[row]} does not exist in {timezone}: the clocks go forward there",
            hint=f"name the zone that the times were written in with {source.zone_option}; exchanges often use UTC",
        )
    try:
        return times.dt.tz_localize(timezone, ambiguous="infer")  # an hour that comes twice in a row is told apart
    except ValueError:
        row = int(np.flatnonzero(times.dt.tz_localize(timezone, ambiguous="NaT").isna())[0])
    raise cells.refused(
        row,
        f"{times.iloc[row]} occurs twice in {timezone}, where the clocks go back: which one is meant is unknown",
        hint="write the offset with the times, such as 2024-10-27T02:00:00+02:00, or write them in UTC",
    )
