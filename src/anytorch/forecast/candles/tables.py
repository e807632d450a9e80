"""A table of candles: where its rows are from, which column is which, and its text as numbers.

From bytes to a table of text, from names to the columns we know, and from text to numbers. What a file does not say is
guessed and reported.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import methodcaller
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anytorch.errors import InputError, PackageMissing
from anytorch.values import dataclass


def require_pandas() -> Any:
    try:
        import pandas  # type: ignore[import-untyped]
    except ModuleNotFoundError as exc:
        if exc.name != "pandas":
            raise
        raise PackageMissing("reading candles needs pandas", hint="pip install 'anytorch[forecast]'") from exc
    return pandas


if TYPE_CHECKING:
    import pandas as pandas
else:

    class WhenUsed:
        """pandas, imported when something of it is first used: a service that makes no forecasts has none."""

        def __getattr__(self, name: str) -> Any:
            return getattr(require_pandas(), name)

    pandas = WhenUsed()

MOST_NAMES, LONGEST_NAME = 12, 40  # of a list of columns in a message
LONGEST_CELL = 100  # characters of a cell in a message


@dataclass(frozen=True)
class Origin:
    """`name` as a message begins; `unit` is what its rows are called; `in_memory`: the caller's own table, not a file."""

    name: str
    unit: str = "line"
    in_memory: bool = False

    @classmethod
    def of(cls, where: Origin | str) -> Origin:
        return where if isinstance(where, cls) else cls(str(where))

    def at(self, place: int, column: str = "") -> str:
        return f"{self.name}, {self.unit} {place}" + (f", column {shown(column)}" if column else "")

    def instrument(self, name: str) -> Origin:
        return Origin(f"{self.name}, {name}", self.unit, self.in_memory)

    @property
    def mend(self) -> str:
        if self.in_memory:
            return "correct the table, or repair it with repair=True, which reports each change"
        return "correct the file, or repair it with --repair (repair=True), which reports each change"

    def name_columns(self, fields: Sequence[str]) -> str:
        if self.in_memory:
            named = ", ".join(f"{field!r}: NAME" for field in fields)
            return f"rename its columns, or map them: read_candles(…, columns={{{named}}})"
        return f"name them: --columns {','.join(f'{field}=NAME' for field in fields)}"

    @property
    def zone_option(self) -> str:
        return "timezone=" if self.in_memory else "--timezone"


@dataclass(frozen=True)
class Cells:
    """A column and its origin, for messages; `lines` are its rows' lines there."""

    lines: Any  # int [rows]
    column: str
    origin: Origin

    def refused(self, row: int, words: str, hint: str = "") -> InputError:
        return InputError(f"{self.origin.at(self.lines[row], self.column)}: {words}", hint=hint)


def listed(names: Iterable[object]) -> str:
    """Names in quotes, cut short: a file that is not a table can have thousands of columns."""
    every = [str(name) for name in names]
    shown = [repr(name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…") for name in every[:MOST_NAMES]]
    more = f" and {len(every) - MOST_NAMES} more" if len(every) > MOST_NAMES else ""
    return (", ".join(shown) or "none") + more


def shown(value: object) -> str:
    """A cell in quotes, cut short: one without a closing quote can be a whole file."""
    text = str(value)
    return repr(text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 1] + "…")


PRICES = ("open", "high", "low", "close")
FIELDS = (*PRICES, "volume", "amount")
ALL = ("timestamps", "date", "time", *FIELDS, "symbol")
GZIP = b"\x1f\x8b"
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "万": 1e4, "亿": 1e8}
STANDARD_INPUT = "-"
JSON = re.compile(r"""\s*(\{\s*["}]|\[\s*[\[{"\d\]-])""")  # but [Date],[Open] is how some databases write a header


def read_table(source: Any, name: str | None = None) -> tuple[Origin, Any, list[int], list[str]]:
    """Where it is from (`name` if that is given), the table as it stands there, each row's line, and what was guessed."""
    table = as_pandas(source, "the dictionary")
    if table is not None:
        where = Origin(name or "the table", "row", in_memory=True)
        return where, _without_index(table), list(range(len(table))), []
    said, body = _bytes_of(source)
    said = name or said
    if body[:2] == GZIP:
        body = _unpacked(body, said)
    if not body.strip():
        raise InputError(f"{said} is empty")
    kind = "Parquet" if body[:4] == b"PAR1" else "Feather" if body[:6] == b"ARROW1" else ""
    if kind:
        reader = pandas.read_parquet if kind == "Parquet" else pandas.read_feather
        try:
            table = reader(io.BytesIO(body))
        except ImportError as exc:
            raise PackageMissing(f"reading {kind} needs pyarrow", hint="pip install 'anytorch[forecast]'") from exc
        except (OSError, ValueError) as exc:  # pyarrow's errors are both
            raise _damaged(said, f"{kind} file", str(exc)) from exc
        return Origin(said, "row"), _without_index(table), list(range(1, len(table) + 1)), []
    if isinstance(source, (str, Path)) and kind_of(said) in ("parquet", "feather"):
        raise InputError(
            f"{said} is not a {kind_of(said).capitalize()} file: its first bytes are wrong", hint="write it again"
        )
    return (Origin(said), *_text_table(body, said))


def kind_of(name: str) -> str:
    """ "text", "parquet", "feather" or "" (not ours), by the file's name."""
    lower = name.lower().removesuffix(".gz")
    if lower.endswith((".csv", ".tsv", ".txt")):
        return "text"
    return "parquet" if lower.endswith((".parquet", ".pq")) else "feather" if lower.endswith(".feather") else ""


def as_pandas(source: Any, where: str) -> Any:
    """A pandas table from what is one, or None: pandas, polars (lazy too), pyarrow, a dictionary of columns.

    Raises InputError for a dictionary whose columns do not fit together; `where` is what the message calls it.
    """
    if hasattr(source, "collect") and hasattr(source, "collect_schema"):  # polars that was not computed yet
        source = source.collect()
    if hasattr(source, "to_pandas") and hasattr(source, "column_names"):  # pyarrow
        source = source.to_pandas()
    elif hasattr(source, "to_numpy") and hasattr(source, "columns") and not isinstance(source, pandas.DataFrame):
        # polars: column by column, which needs no pyarrow
        source = pandas.DataFrame({name: column_values(source[name]) for name in source.columns})
    if isinstance(source, Mapping):
        try:
            source = pandas.DataFrame(dict(source))
        except (ValueError, TypeError) as exc:
            raise InputError(f"{where} is not a table: {exc}", hint="pass named columns of equal length") from exc
    return source if isinstance(source, pandas.DataFrame) else None


def column_values(column: Any) -> Any:
    """A polars column for pandas, with its time zone."""
    zone = getattr(column.dtype, "time_zone", None)
    values = column.to_numpy()
    return pandas.DatetimeIndex(values).tz_localize("UTC").tz_convert(zone) if zone else values


def _bytes_of(source: Any) -> tuple[str, bytes]:
    if isinstance(source, bytes):
        return "the data", source
    if hasattr(source, "read"):  # an open file
        body, name = source.read(), getattr(source, "name", None)
        where = Path(name).name if isinstance(name, str) else "the data"
        return where, body.encode() if isinstance(body, str) else bytes(body)
    if str(source) == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("standard input is a terminal, not a file", hint="pipe a file into it")
        return "standard input", sys.stdin.buffer.read()
    if not isinstance(source, (str, PathLike)):
        several = isinstance(source, (list, tuple))
        raise InputError(
            f"the source is a {type(source).__name__}, not a file's path, bytes, an open file or a table",
            hint="read one source at a time" if several else "",
        )
    path = Path(source)
    try:
        return path.name, path.read_bytes()
    except OSError as exc:
        raise InputError(f"cannot read {path}: {exc.strerror}", hint="check the path and its permissions") from exc


def _unpacked(body: bytes, where: str) -> bytes:
    import gzip
    import zlib

    try:
        return gzip.decompress(body)
    except (OSError, EOFError, zlib.error) as exc:
        why = "it ends too early" if isinstance(exc, EOFError) else str(exc).rpartition(": ")[2]
        raise _damaged(where, "gzip file", why) from exc


def _damaged(where: str, what: str, why: str) -> InputError:
    first = (why.splitlines() or [""])[0]
    if "magic bytes not found in footer" in first:
        first = "its end is missing"
    return InputError(f"{where} is a damaged {what}: {first}", hint="download or write it again")


def _without_index(table: Any) -> Any:
    if isinstance(table.columns, pandas.MultiIndex):  # yfinance: ("Close", "AAPL")
        table = table.copy()
        table.columns = [str(part[0]) for part in table.columns]
        if table.columns.has_duplicates:
            raise InputError(
                "the table has two levels of columns and several instruments", hint="stack the instruments in rows"
            )
    if isinstance(table.index, pandas.PeriodIndex):
        table = table.set_axis(table.index.to_timestamp(), axis=0)
    if not isinstance(table.index, pandas.RangeIndex) and pandas.api.types.is_datetime64_any_dtype(table.index):
        table = table.rename_axis(index=table.index.name or "timestamps").reset_index()
    table = table.copy()
    table.columns = [str(name) for name in table.columns]
    return table


def _text_table(body: bytes, where: str) -> tuple[Any, list[int], list[str]]:
    text, notes = _decoded(body, where)
    if not text.strip():  # a mark of its encoding, and nothing else
        raise InputError(f"{where} is empty")
    if JSON.match(text):
        raise InputError(f"{where} is JSON, which is not supported", hint="write it as CSV, Parquet or Feather")
    rows = text.splitlines()
    separator = max(SEPARATORS, key=lambda mark: _evenness(rows[:50], mark))
    alone = _evenness(rows[:50], separator) <= 1
    filled = [line for line in rows if line.strip()]
    if alone and not (filled[1:] and all(map(_numeric, filled[1:50]))):  # a column of numbers needs no separator
        raise InputError(
            f"{where}: no separator found in the first line {rows[0][:60]!r}", hint="separate columns with commas"
        )
    separator = "," if alone else separator
    fields = [filled[0]] if alone else filled[0].split(separator)
    header = not all(_numeric(field) for field in (fields if alone else fields[1:5]))
    notes += [] if separator == "," else [f"the columns are separated by {SEPARATORS[separator]}"]
    try:
        # Everything as text, every line a row: what cannot be read is then told with its own line and word.
        table = pandas.read_csv(
            io.StringIO(text),
            sep=separator,
            header=0 if header else None,
            dtype=str,
            keep_default_na=False,
            skip_blank_lines=False,
            skipinitialspace=True,
        )
    except (pandas.errors.ParserError, ValueError) as exc:
        words = str(exc).strip().splitlines()[-1].removeprefix("Error tokenizing data. C error: ")
        raise InputError(f"{where}: {words}", hint="check the separators") from exc
    table.columns = [str(name).strip() for name in table.columns]
    lines = list(range(2 if header else 1, len(table) + (2 if header else 1)))
    table.attrs["header"] = header
    return table, lines, notes


def extent(text: str) -> tuple[int, int]:
    """The lines of a text, and the most columns that one of them can have, whatever separates them.

    Cheap: for a limit that is checked before anything is made of the text.

    >>> extent("a,b\r\n1;2;3\r")
    (2, 3)
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    return len(lines), 1 + max(max(map(methodcaller("count", mark), lines)) for mark in SEPARATORS)


def _decoded(body: bytes, where: str) -> tuple[str, list[str]]:
    """The text, and which encoding was guessed if it does not say so itself."""
    if body[:2] in (b"\xff\xfe", b"\xfe\xff"):
        guesses = ["utf-16"]
    else:
        guesses = ["utf-8-sig", *(("gb18030", "cp1252") if _chinese(body) else ("cp1252", "gb18030"))]
    for encoding in guesses:
        try:
            text = body.decode(encoding)
        except UnicodeDecodeError:
            continue
        known = {"gb18030": "GB 18030 (Chinese)", "cp1252": "Windows-1252 (Western)"}.get(encoding)
        if "\0" in text:
            break
        return text, [f"the text is not UTF-8; it is read as {known}"] if known else []
    raise InputError(f"{where} is not in a known text encoding", hint="save it as UTF-8, or as Parquet")


def _chinese(body: bytes) -> bool:
    """Whether most of what is not ASCII are pairs of GB 2312's common characters; in Western words they stand alone."""
    pairs = singles = 0
    for run in re.findall(rb"[\x80-\xff]+", body[:200_000]):
        for place in range(0, len(run), 2):
            pair = run[place : place + 2]
            common = len(pair) == 2 and (0xA1 <= pair[0] <= 0xA9 or 0xB0 <= pair[0] <= 0xD7) and pair[1] >= 0xA1
            pairs, singles = pairs + common, singles + (not common)
    return pairs > singles


def _evenness(rows: Sequence[str], mark: str) -> int:
    """Columns that this separator gives in the first line, if it gives about as many in the others."""
    counts = [re.sub(r'"[^"]*"', "", line).count(mark) + 1 for line in rows if line.strip()]
    return counts[0] if counts and sum(count == counts[0] for count in counts) >= 0.8 * len(counts) else 0


def _numeric(text: str) -> bool:
    try:
        float(text.strip().strip('"').replace(",", "."))
    except ValueError:
        return False
    return True


# --- numbers ---------------------------------------------------------------------------------------------------------


def parse_numbers(values: Any, lines: Sequence[int], column: str, where: Origin | str) -> tuple[Any, list[str]]:
    """A column as numbers. Missing ones become NaN (`check` names them); words raise InputError with their line."""
    if pandas.api.types.is_numeric_dtype(values):
        return values.astype(float).reset_index(drop=True), []
    text = values.astype(str).str.strip()
    missing = text.str.lower().isin(["", "nan", "na", "n/a", "null", "none", "-", "--", "nat"])
    ways: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("", lambda s: s),
        ("a decimal comma", lambda s: s.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)),
        ("commas between thousands", lambda s: s.str.replace(",", "", regex=False)),
        ("signs and suffixes such as $ and 1.5M", _scaled),
    )
    for words, change in ways:
        numbers = pandas.to_numeric(change(text.where(~missing)), errors="coerce").astype(float)
        wrong = (numbers.isna() & ~missing).to_numpy()
        if not wrong.any() and _plausible(words, text):
            return numbers.reset_index(drop=True), [f"column {column!r} is read with {words}"] if words else []
        if not words:
            bad = int(np.flatnonzero(wrong)[0])  # the first that is no number as it stands
    source = Origin.of(where)
    option = "columns=" if source.in_memory else "--columns"
    raise Cells(lines, column, source).refused(
        bad,
        f"{shown(text.iloc[bad])} is not a number",
        hint=f"correct that {source.unit}, or name another column with {option}",
    )


def _plausible(words: str, text: Any) -> bool:
    """ "1,234" alone could be either: a comma is a decimal one unless every comma is followed by three digits."""
    if words != "a decimal comma":
        return True
    return not text[text.str.contains(",", regex=False)].str.fullmatch(r"[^,]*(,\d{3})+(\.\d+)?").all()


def _scaled(text: Any) -> Any:
    parts = text.str.replace(r"[\s,$€£¥%]", "", regex=True).str.extract(r"^([-+.\deE]+?)([kKmMbBtT万亿]?)$")
    scale = parts[1].str.lower().map({**SUFFIXES, "": 1.0})
    return pandas.to_numeric(parts[0], errors="coerce") * scale
