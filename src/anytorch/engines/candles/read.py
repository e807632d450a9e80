"""Candles from CSV, TSV, Parquet or Feather: one instrument or many, a file or standard input.

What is not said is guessed (separator, columns, decimal comma, time format, rhythm) and told in `notes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.counts import counted
from anytorch.engines.candles.check import gaps, repaired, require_clean
from anytorch.engines.candles.columns import FIELDS, Columns, columns_without_header, guess_columns
from anytorch.engines.candles.rhythm import Rhythm, future_times, rhythm_of
from anytorch.engines.candles.tables import STANDARD_INPUT, parse_numbers, read_table, require_pandas
from anytorch.engines.candles.times import parse_times
from anytorch.errors import InputError
from anytorch.values import dataclass

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]


@dataclass(frozen=True)
class CandleSeries:
    """One instrument: clean candles in time order. `notes` say what was guessed and mended."""

    name: str
    frame: Any  # DataFrame: timestamps, open, high, low, close, and volume, amount where the file has them
    rhythm: Rhythm
    notes: tuple[str, ...] = ()
    where: str = ""  # the file, for messages

    def __len__(self) -> int:
        return len(self.frame)

    def future(self, horizon: int) -> pd.DatetimeIndex:
        """The times of the next bars, by the rhythm of the whole series: its last rows alone would not show it."""
        return future_times(self.frame["timestamps"], horizon, self.rhythm)


def read_candles(
    source: str | Path | Any,
    *,
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    repair: bool = False,
) -> list[CandleSeries]:
    """The instruments of one source: a file's path, "-" for standard input, bytes, or a pandas or polars table.

    Raises InputError with line and column for what cannot be used; `repair=True` mends what `check.py` lists instead.
    A series with a huge gap is cut in two by `repair`: "NAME" and "NAME/2".
    """
    where, table, lines, notes = read_table(source)
    if table.attrs.get("header", True):
        found = guess_columns(list(table.columns), given=columns, where=where)
    else:
        found = columns_without_header(len(table.columns), where)
    table, lines = _without_blank_lines(table, lines, where)
    notes = [*notes, *_told(found)]
    series: list[CandleSeries] = []
    for name, rows in _instruments(table, found, where):
        own_lines = [lines[row] for row in rows]
        frame, said = _frame(table.iloc[rows].reset_index(drop=True), found, own_lines, where, timezone)
        title = f"{where}, {name}" if "symbol" in found.of else where
        if repair:
            frame, kept, changed = repaired(frame, own_lines, title)
            said += changed
        else:
            require_clean(frame, own_lines, title)
            kept = own_lines
        series += _cut(name, frame, kept, (*notes, *said), title)
        notes = []  # told once
    return series


def read_many(sources: Sequence[str | Path | Any], **options: Any) -> list[CandleSeries]:
    """The instruments of several sources, folders included (their CSV and Parquet files). Names are made distinct."""
    found: list[CandleSeries] = []
    for source in sources:
        for part in _files(source):
            found += read_candles(part, **options)
    names: dict[str, int] = {}
    for place, one in enumerate(found):
        names[one.name] = names.get(one.name, 0) + 1
        if names[one.name] > 1:
            found[place] = CandleSeries(f"{one.name}#{names[one.name]}", one.frame, one.rhythm, one.notes, one.where)
    return found


def _files(source: Any) -> Iterator[Any]:
    if not isinstance(source, (str, Path)) or source == STANDARD_INPUT or not Path(source).is_dir():
        yield source
        return
    inside = sorted(path for path in Path(source).iterdir() if kind_of(path.name))
    if not inside:
        raise InputError(f"the folder {source} holds no .csv, .tsv, .txt, .parquet or .feather file")
    yield from inside


def kind_of(name: str) -> str:
    """ "text", "parquet", "feather" or "" (not ours), by the file's name."""
    lower = name.lower().removesuffix(".gz")
    if lower.endswith((".csv", ".tsv", ".txt")):
        return "text"
    return "parquet" if lower.endswith((".parquet", ".pq")) else "feather" if lower.endswith(".feather") else ""


# --- from a table to candles -----------------------------------------------------------------------------------------


def _without_blank_lines(table: Any, lines: list[int], where: str) -> tuple[Any, list[int]]:
    import numpy as np

    filled = np.ones(len(table), bool)
    if "header" in table.attrs:  # it was text: every cell is
        filled = (table != "").any(axis=1).to_numpy()
    rows = np.flatnonzero(filled)
    if not len(rows):
        raise InputError(f"{where} has a header and no rows")
    return table.iloc[rows].reset_index(drop=True), [lines[row] for row in rows]


def _told(columns: Columns) -> list[str]:
    renamed = [f"{field} = {name!r}" for field, name in columns.of.items() if field != name]
    notes = [f"columns: {', '.join(renamed)}"] if renamed else []
    if columns.ignored:
        notes.append(f"not used: {', '.join(map(repr, columns.ignored))}")
    absent = [field for field in ("volume", "amount") if field not in columns.of]
    if absent:
        notes.append(f"no {' and no '.join(absent)} column")
    return [*columns.notes, *notes]


def _instruments(table: Any, columns: Columns, where: str) -> Iterator[tuple[str, Any]]:
    import numpy as np

    if "symbol" not in columns.of:
        yield Path(where).name.split(".")[0], np.arange(len(table))
        return
    symbols = table[columns.of["symbol"]].astype(str).str.strip()
    for name in symbols.unique():
        yield str(name), np.flatnonzero((symbols == name).to_numpy())


def _frame(
    table: Any, columns: Columns, lines: Sequence[int], where: str, timezone: str | None
) -> tuple[pd.DataFrame, list[str]]:
    pandas = require_pandas()
    of = columns.of
    if "timestamps" in of:
        stamps, column = table[of["timestamps"]], of["timestamps"]
    else:
        column = f"{of['date']} + {of['time']}"
        stamps = table[of["date"]].astype(str).str.strip() + " " + table[of["time"]].astype(str).str.strip()
    times, notes = parse_times(stamps, lines, column, where)
    frame = pandas.DataFrame({"timestamps": _in_zone(times, timezone)})
    for field in FIELDS:
        if field in of:
            frame[field], said = parse_numbers(table[of[field]], lines, of[field], where)
            notes += said
    return frame, notes


def _in_zone(times: Any, timezone: str | None) -> Any:
    if timezone is None:
        return times
    try:
        return times.dt.tz_localize(timezone) if times.dt.tz is None else times.dt.tz_convert(timezone)
    # An unknown zone; an hour that does not exist there; a name that is no name, which reaches the file system.
    except (LookupError, ValueError, TypeError, OSError, ModuleNotFoundError) as exc:
        raise InputError(f"timezone {timezone!r}: {exc}", hint="write a name such as Europe/Berlin or UTC") from exc


def _cut(name: str, frame: Any, lines: Any, notes: tuple[str, ...], where: str) -> Iterator[CandleSeries]:
    """One series, or its pieces between huge gaps (which only a repair lets through)."""
    if len(frame) < 2:
        raise InputError(
            f"{where} has {counted(len(frame), 'usable row')}; a series needs at least 2", hint="give more rows"
        )
    edges = [0, *gaps(frame["timestamps"]), len(frame)]
    pieces = [(start, stop) for start, stop in pairwise(edges) if stop - start >= 2]
    for number, (start, stop) in enumerate(pieces, 1):
        piece = frame.iloc[start:stop].reset_index(drop=True)
        rhythm = rhythm_of(piece["timestamps"])
        said = list(notes) if number == 1 else []
        said.append(f"frequency: {rhythm}")
        if len(pieces) > 1:
            said.append(f"part {number} of {len(pieces)}, cut at huge gaps: lines {lines[start]} to {lines[stop - 1]}")
        yield CandleSeries(name if number == 1 else f"{name}/{number}", piece, rhythm, tuple(said), where)
