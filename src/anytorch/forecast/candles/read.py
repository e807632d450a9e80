"""Candles from CSV, TSV, Parquet or Feather: one instrument or many, a file or standard input.

What is not said is guessed (separator, columns, decimal comma, time format, rhythm) and reported in `notes`. Faults are
refused with line and column, or corrected by `repair`:

| what is wrong | the repair |
|---|---|
| timestamps out of order | sorted |
| a timestamp twice | the last of them is kept |
| a timestamp missing | nothing: it is refused before |
| a price that is missing, zero or negative | close: the one before; open: the close before; high, low: of these |
| high below low | swapped |
| volume missing or negative | 0 |
| amount missing or negative | volume times the mean price |
| a price that never changes | kept: its forecast is itself |
| a gap far beyond the rhythm | the series is cut there |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.forecast.candles.columns import Columns, columns_without_header, guess_columns
from anytorch.forecast.candles.rhythm import Rhythm, future_times, rhythm_of
from anytorch.forecast.candles.single import as_candles, counted_days, given_columns, is_single, marked
from anytorch.forecast.candles.tables import (
    FIELDS,
    PRICES,
    STANDARD_INPUT,
    Cells,
    Origin,
    kind_of,
    listed,
    parse_numbers,
    read_table,
    shown,
)
from anytorch.forecast.candles.tables import pandas as pd
from anytorch.forecast.candles.times import in_zone, parse_times
from anytorch.values import dataclass

Choose = Callable[[list[str]], Sequence[str]]
MOST_MENDED = 0.2  # of the rows: beyond that a repair would be an invention
GAP_STEPS = 10  # a gap is huge beyond this many times a usual long step (a night, a weekend) …
GAP_DAYS = 14  # … and never below this


@dataclass(frozen=True)
class Problem:
    """One kind of fault: its first place and how often it occurs."""

    kind: str
    line: int
    column: str
    text: str
    count: int = 1

    def said(self, where: Origin | str) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{Origin.of(where).at(self.line, self.column)}: {self.text}{more}"


def problems(frame: pd.DataFrame, lines: Sequence[int]) -> list[Problem]:
    """All faults of a frame with our columns; `lines` are the rows' line numbers in their file.

    Prices are above 0; single values (single.py) need not be.
    """
    found: list[Problem] = []

    def note(kind: str, column: str, bad: Any, text: str) -> None:
        places = np.flatnonzero(bad)
        if len(places):
            value = frame[column].iloc[places[0]]
            found.append(Problem(kind, int(lines[places[0]]), column, text.format(value=value), len(places)))

    times = frame["timestamps"]
    steps = times.diff()
    zero = steps - steps  # NaT in the first row, so that it is never counted
    note("unsorted", "timestamps", (steps < zero).to_numpy(), "{value} comes after a later timestamp")
    note("duplicate", "timestamps", times.duplicated().to_numpy(), "{value} occurs twice")
    for column in given_columns(frame):
        values = frame[column].to_numpy(dtype=float)
        note("missing", column, ~np.isfinite(values), "{value} is not a number")
        with np.errstate(invalid="ignore"):
            if column in PRICES and not is_single(frame):
                note("price", column, values <= 0, "the price is {value}, which is not above 0")
            elif column not in PRICES:
                note("negative", column, values < 0, "{value} is negative")
    note("upside-down", "high", (frame["high"] < frame["low"]).to_numpy(), "{value} is below the low of the same bar")
    prices = frame[list(PRICES)].to_numpy(dtype=float)
    if len(frame) > 1 and np.isfinite(prices).all() and (prices == prices[0, 0]).all():
        found.append(Problem("constant", int(lines[0]), "close", f"all prices are {prices[0, 0]:g}, in every row"))
    for place in gaps(times):
        text = f"{times.iloc[place - 1]} is followed by {times.iloc[place]}: a gap far beyond the usual step"
        found.append(Problem("gap", int(lines[place]), "timestamps", text))
    return found


def gaps(times: Any) -> list[int]:
    """The rows before which there is a huge gap."""
    if len(times) < 3:
        return []
    seconds = times.diff().dt.total_seconds().to_numpy()[1:]
    if not (seconds > 0).any():
        return []
    # The usual long step, such as a weekend; of few rows one gap may be more than a hundredth, so those are left out.
    most = max(GAP_STEPS * float(np.median(seconds[seconds > 0])), GAP_DAYS * 86400)
    usual = float(np.quantile(seconds[(seconds > 0) & (seconds <= most)], 0.99, method="lower"))
    return [int(place) + 1 for place in np.flatnonzero(seconds > max(GAP_STEPS * usual, GAP_DAYS * 86400))]


def repaired(frame: pd.DataFrame, lines: Sequence[int], where: Origin | str) -> tuple[pd.DataFrame, Any, list[str]]:
    """The frame with every repair of the table above except the gaps, its lines, and what was changed, in words."""
    found = problems(frame, lines)
    if not found:
        return frame, np.asarray(lines), []
    kinds, single = {problem.kind for problem in found}, is_single(frame)
    frame = frame.reset_index(drop=True)
    kept = np.asarray(lines)
    if "unsorted" in kinds:
        order = np.argsort(frame["timestamps"].to_numpy(), kind="stable")
        frame, kept = frame.iloc[order].reset_index(drop=True), kept[order]
    if "duplicate" in kinds:
        once = ~frame["timestamps"].duplicated(keep="last").to_numpy()
        frame, kept = frame[once].reset_index(drop=True), kept[once]
    frame = frame.copy()
    given = given_columns(frame)
    for column in [*given, *(name for name in FIELDS if name in frame and name not in given)]:
        values = frame[column].to_numpy(dtype=float).copy()
        bad = ~np.isfinite(values)
        if not (column in PRICES and single):
            bad |= values <= 0 if column in PRICES else values < 0
        if column in PRICES and bad.mean() > MOST_MENDED:
            what = "values are missing" if single else "prices are missing or not above 0"
            raise Cells(kept, column, Origin.of(where)).refused(
                int(np.flatnonzero(bad)[0]),
                f"{bad.mean():.0%} of the {what}, more than a repair may fill in ({MOST_MENDED:.0%})",
                hint="remove the faulty part",
            )
        values[bad] = np.nan
        frame[column] = values
    frame["close"] = frame["close"].ffill()
    before = frame["close"].shift()
    frame["open"] = frame["open"].fillna(before)
    started = (frame["open"].notna() & frame["close"].notna()).to_numpy()  # nothing comes before the first row
    left_out = kept[~started]
    frame, kept = frame[started].reset_index(drop=True), kept[started]
    ends = frame[["open", "close"]]
    frame["high"] = frame["high"].fillna(ends.max(axis=1))
    frame["low"] = frame["low"].fillna(ends.min(axis=1))
    high, low = frame[["high", "low"]].max(axis=1), frame[["high", "low"]].min(axis=1)
    frame["high"], frame["low"] = high, low
    if "volume" in frame:
        frame["volume"] = frame["volume"].fillna(0.0)
    if "amount" in frame:
        made_up = frame[list(PRICES)].mean(axis=1) * frame.get("volume", 0.0)
        frame["amount"] = frame["amount"].fillna(made_up)
    frame = marked(frame, single)
    notes = [
        f"repaired: {problem.said(where)}; {_changed(problem, frame, kept)}"
        for problem in found
        if problem.kind not in ("gap", "constant")
    ]
    notes += [
        f"kept: {problem.said(where)}; their forecast is constant" for problem in found if problem.kind == "constant"
    ]
    if len(left_out):
        rows = counted(len(left_out), f"{Origin.of(where).unit} is", f"{Origin.of(where).unit}s are")
        notes.append(f"repaired: {rows} left out, from {left_out[0]} on: there is no earlier price to use instead")
    return frame, kept, notes


TAKEN = {
    "close": "the close before",
    "open": "the close before",
    "high": "the higher of open and close",
    "low": "the lower of open and close",
    "volume": "",
    "amount": "volume times the mean price",
}


def _changed(problem: Problem, frame: pd.DataFrame, kept: Any) -> str:
    """What the repair changed at the first place of a fault, in words."""
    if problem.kind == "unsorted":
        return "the rows are sorted by time"
    if problem.kind == "duplicate":
        return "the last row of each time is kept"
    rows = (kept == problem.line).nonzero()[0]
    if not len(rows):
        return "the row is left out"
    value = f"{frame[problem.column].iloc[rows[0]]:.9g}"
    if problem.kind == "upside-down":
        return f"high and low are swapped, the high is {value}"
    taken = TAKEN[problem.column]
    return f"it is now {value}" + (f", {taken}" if taken else "")


def require_rows(rows: int, need: int, where: str, what: str) -> None:
    if rows < need:
        raise InputError(f"{where} has {rows} usable rows; {what} needs at least {need}", hint="give a longer history")


@dataclass(frozen=True)
class CandleSeries:
    """One instrument: clean candles in time order. `notes` list guesses and repairs."""

    name: str
    frame: Any  # DataFrame: timestamps, open, high, low, close, and volume, amount where the file has them
    rhythm: Rhythm
    notes: tuple[str, ...] = ()
    where: str = ""  # the file, for messages
    part_of: str = ""  # the whole that it was cut from at a huge gap; "" for a whole

    def __len__(self) -> int:
        return len(self.frame)

    def future(self, horizon: int) -> pd.DatetimeIndex:
        """The times of the next bars, by the rhythm of the whole series."""
        return future_times(self.frame["timestamps"], horizon, self.rhythm)


def read_candles(
    source: str | Path | Any,
    *,
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    repair: bool = False,
    name: str | None = None,
    choose: Choose | None = None,
    newest: bool = False,
) -> list[CandleSeries]:
    """The instruments of one source: a file's path, "-" for standard input, bytes, an open file, or a table.

    A table is pandas', polars' or pyarrow's, or a dictionary of columns. `name` is what the instrument is called, in
    messages too, in place of the file's name. `choose` is given the instruments' names and returns those to read: the
    others cost nothing. Raises InputError with line and column for what cannot be used; `repair=True` mends what the table
    above lists instead. A series with a huge gap is cut in two by `repair`: "NAME" and "NAME/2"; `newest=True` returns the
    last part alone.
    """
    where, table, lines, notes = read_table(source, name)
    try:
        if table.attrs.get("header", True):
            found = guess_columns(list(table.columns), given=columns, where=where)
        else:
            found = columns_without_header(len(table.columns), where)
    except InputError as exc:  # what was guessed before may be why
        raise InputError("; ".join([exc.message, *notes]), hint=exc.hint) from exc
    table, lines = _without_blank_lines(table, lines, where)
    notes = [*notes, *_told(found)]
    series: list[CandleSeries] = []
    parts = list(_instruments(table, found, lines, where))
    if choose is not None:
        chosen = set(choose([symbol for symbol, _ in parts]))
        parts = [(symbol, rows) for symbol, rows in parts if symbol in chosen]
    for symbol, rows in parts:
        own_lines = [lines[row] for row in rows]
        frame, said = _frame(table.iloc[rows].reset_index(drop=True), found, own_lines, where, timezone)
        title = where.instrument(symbol) if "symbol" in found.of else where
        if len(frame) > 2 and frame["timestamps"].is_monotonic_decreasing:
            frame, own_lines = frame.iloc[::-1].reset_index(drop=True), own_lines[::-1]
            said.append("the newest rows come first; they are read from the end")
        if repair:
            frame, kept, changed = repaired(frame, own_lines, title)
            said += changed
        else:
            kept = own_lines
            if found_wrong := problems(frame, own_lines):
                others = sorted({problem.kind for problem in found_wrong} - {found_wrong[0].kind})
                also = f"; also {', '.join(others)}" if others else ""
                raise InputError(found_wrong[0].said(title) + also, hint=title.mend)
        own_name = name if name is not None and len(parts) == 1 else symbol
        series += _cut(own_name, frame, kept, (*notes, *said), title, newest)
        notes = []  # told once
    return series


def read_many(sources: Sequence[str | Path | Any], **options: Any) -> list[CandleSeries]:
    """The instruments of several sources, folders included (their CSV and Parquet files). Names are made distinct."""
    found: list[CandleSeries] = []
    seen: set[Path] = set()
    again: list[str] = []
    for source in sources:
        for part in _files(source):
            if isinstance(part, (str, Path)) and part != STANDARD_INPUT:
                path = Path(part).resolve()
                if path in seen:
                    again.append(f"{part} is listed more than once; it is read once")
                    continue
                seen.add(path)
            found += read_candles(part, **options)
    names: dict[str, int] = {}
    for place, one in enumerate(found):
        names[one.name] = names.get(one.name, 0) + 1
        if names[one.name] > 1:
            whole = f"{one.part_of}#{names[one.name]}" if one.part_of else ""
            found[place] = replace(one, name=f"{one.name}#{names[one.name]}", part_of=whole)
    if again:
        found[0] = replace(found[0], notes=(*again, *found[0].notes))
    return found


def newest_parts(series: Sequence[CandleSeries]) -> list[CandleSeries]:
    """The last part of each series that was cut at huge gaps."""
    return list({one.part_of or one.name: one for one in series}.values())


def _files(source: Any) -> Iterator[Any]:
    if not isinstance(source, (str, Path)) or source == STANDARD_INPUT or not Path(source).is_dir():
        yield source
        return
    inside = sorted(path for path in Path(source).iterdir() if kind_of(path.name))
    if not inside:
        raise InputError(f"the folder {source} holds no .csv, .tsv, .txt, .parquet or .feather file")
    yield from inside


# --- from a table to candles -----------------------------------------------------------------------------------------


def _without_blank_lines(table: Any, lines: list[int], where: Origin) -> tuple[Any, list[int]]:
    filled = np.ones(len(table), bool)
    if "header" in table.attrs:  # it was text: every cell is
        filled = (table != "").any(axis=1).to_numpy()
    rows = np.flatnonzero(filled)
    if not len(rows):
        raise InputError(f"{where.name} has a header but no rows")
    return table.iloc[rows].reset_index(drop=True), [lines[row] for row in rows]


def _told(columns: Columns) -> list[str]:
    renamed = [f"{field} = {shown(name)}" for field, name in columns.of.items() if field != name]
    notes = [f"columns: {', '.join(renamed)}"] if renamed else []
    if columns.ignored:
        notes.append(f"not used: {listed(columns.ignored)}")
    absent = [field for field in ("volume", "amount") if field not in columns.of]
    if absent:
        notes.append(f"no {' and no '.join(absent)} column")
    return [*columns.notes, *notes]


def _instruments(table: Any, columns: Columns, lines: Sequence[int], where: Origin) -> Iterator[tuple[str, Any]]:
    if "symbol" not in columns.of:
        yield Path(where.name).name.split(".")[0], np.arange(len(table))
        return
    column = columns.of["symbol"]
    symbols = table[column].astype(str).str.strip()
    blank = np.flatnonzero((table[column].isna() | (symbols == "")).to_numpy())
    if len(blank):
        more = f" (and {len(blank) - 1} more)" if len(blank) > 1 else ""
        raise Cells(lines, column, where).refused(
            blank[0], f"the instrument's name is missing{more}", hint="fill it in"
        )
    codes, names = pd.factorize(symbols)  # in the order in which they come
    rows = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    yield from zip(map(str, names), rows, strict=True)


def _frame(
    table: Any, columns: Columns, lines: Sequence[int], where: Origin, timezone: str | None
) -> tuple[pd.DataFrame, list[str]]:
    of = columns.of
    if "timestamps" in of:
        stamps, column = table[of["timestamps"]], of["timestamps"]
    elif "date" not in of:
        stamps, column = counted_days(len(table)).to_series(index=table.index), "timestamps"
    else:
        column = f"{of['date']} + {of['time']}"
        stamps = table[of["date"]].astype(str).str.strip() + " " + table[of["time"]].astype(str).str.strip()
    times, notes = parse_times(stamps, lines, column, where, zoned=timezone is not None)
    frame = pd.DataFrame({"timestamps": in_zone(times, timezone, lines, column, where)})
    for field in FIELDS:
        if field in of:
            frame[field], said = parse_numbers(table[of[field]], lines, of[field], where)
            notes += said
    if not any(field in of for field in ("open", "high", "low")):
        frame = as_candles(frame)
    return frame, notes


def _cut(
    name: str, frame: Any, lines: Any, notes: tuple[str, ...], where: Origin, newest: bool
) -> Iterator[CandleSeries]:
    """One series, or its pieces between huge gaps (which only a repair lets through); `newest`: the last of them alone.

    The last piece is what is forecast from, so what there is to say about the whole is said with it.
    """
    if len(frame) < 2:
        raise InputError(
            f"{where.name} has {counted(len(frame), 'usable row')}; a series needs at least 2", hint="give more rows"
        )
    times = frame["timestamps"]
    edges = [0, *gaps(times), len(frame)]
    pieces = [(start, stop) for start, stop in pairwise(edges) if stop - start >= 2]
    if not pieces:
        raise InputError(f"{where.name} has a huge gap after every row", hint=f"check the times of its {where.unit}s")
    whole = rhythm_of(pd.concat([times.iloc[start:stop] for start, stop in pieces]))
    said = [*notes, *(_alone(start, times, lines, where) for start, stop in pairwise(edges) if stop - start < 2)]
    for number, (start, stop) in list(enumerate(pieces, 1))[-1 if newest else 0 :]:
        piece = marked(frame.iloc[start:stop].reset_index(drop=True), is_single(frame))
        rhythm = rhythm_of(piece["timestamps"])
        # A short piece does not show its market's hours; the others do, if they are of the same kind.
        rhythm = whole if whole.step == rhythm.step else rhythm
        own = said if number == len(pieces) else []
        own = [*own, f"frequency: {rhythm}"]
        if len(pieces) > 1:
            span = f"{where.unit}s {lines[start]} to {lines[stop - 1]}"
            own.append(f"part {number} of {len(pieces)}, cut at huge gaps: {span}")
        own_name, part_of = name if number == 1 else f"{name}/{number}", name if len(pieces) > 1 else ""
        yield CandleSeries(own_name, piece, rhythm, tuple(own), where.name, part_of)


def _alone(row: int, times: Any, lines: Any, where: Origin) -> str:
    newest = ", the newest bar," if row == len(times) - 1 else ""
    gap = times.iloc[row] - times.iloc[row - 1] if row else times.iloc[1] - times.iloc[0]
    side = "after" if row else "before"
    return (
        f"left out: {where.unit} {lines[row]} ({times.iloc[row]}){newest} stands alone {side} a gap of "
        f"{counted(gap.days, 'day')}; a series needs at least 2 rows"
    )
