"""From bytes to a table of text, and from text to numbers. What a file does not say is guessed and told."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anytorch.errors import InputError, PackageMissing

SEPARATORS = (",", ";", "\t", "|")
SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "万": 1e4, "亿": 1e8}
STANDARD_INPUT = "-"


def require_pandas() -> Any:
    try:
        import pandas  # type: ignore[import-untyped]
    except ModuleNotFoundError as exc:
        if exc.name != "pandas":
            raise
        raise PackageMissing("reading candles needs pandas", hint="pip install 'anytorch[forecast]'") from exc
    return pandas


def read_table(source: Any) -> tuple[str, Any, list[int], list[str]]:
    """Where it is from, the table as it stands there, each row's line, and what was guessed."""
    pandas = require_pandas()
    if hasattr(source, "to_pandas"):  # polars, pyarrow
        source = source.to_pandas()
    if isinstance(source, pandas.DataFrame):
        return "the table", _without_index(source), list(range(len(source))), []
    if isinstance(source, bytes):
        where, body = "the data", source
    elif str(source) == STANDARD_INPUT:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("standard input is a terminal: there is nothing to read", hint="pipe a file into it")
        where, body = "standard input", sys.stdin.buffer.read()
    else:
        path = Path(source)
        where = path.name
        try:
            body = path.read_bytes()
        except OSError as exc:
            raise InputError(f"cannot read {path}: {exc.strerror}", hint="check the path and its permissions") from exc
    if body[:2] == b"\x1f\x8b":
        import gzip

        body = gzip.decompress(body)
    if not body.strip():
        raise InputError(f"{where} is empty")
    if body[:4] == b"PAR1" or body[:6] == b"ARROW1":
        reader = pandas.read_parquet if body[:4] == b"PAR1" else pandas.read_feather
        try:
            table = reader(io.BytesIO(body))
        except (OSError, ValueError) as exc:  # pyarrow's errors are both
            raise InputError(f"{where} is damaged: {str(exc).splitlines()[0]}") from exc
        return where, _without_index(table), list(range(1, len(table) + 1)), []
    return (where, *_text_table(body, where))


def _without_index(table: Any) -> Any:
    pandas = require_pandas()
    if isinstance(table.columns, pandas.MultiIndex):  # yfinance: ("Close", "AAPL")
        table = table.copy()
        table.columns = [str(part[0]) for part in table.columns]
        if table.columns.has_duplicates:
            raise InputError("the table has two levels of columns and several instruments", hint="stack them in rows")
    if not isinstance(table.index, pandas.RangeIndex) and pandas.api.types.is_datetime64_any_dtype(table.index):
        table = table.rename_axis(index=table.index.name or "timestamps").reset_index()
    table = table.copy()
    table.columns = [str(name) for name in table.columns]
    return table


def _text_table(body: bytes, where: str) -> tuple[Any, list[int], list[str]]:
    pandas = require_pandas()
    text = _decoded(body, where)
    rows = text.splitlines()
    separator = max(SEPARATORS, key=lambda mark: _evenness(rows[:50], mark))
    if _evenness(rows[:50], separator) <= 1:
        raise InputError(
            f"{where}: no separator found in the first line {rows[0][:60]!r}", hint="separate columns with commas"
        )
    fields = next(line for line in rows if line.strip()).split(separator)
    header = not all(_numeric(field) for field in fields[1:5])
    notes = [] if separator == "," else [f"the columns are separated by {_named(separator)}"]
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


def _decoded(body: bytes, where: str) -> str:
    for encoding in ("utf-16",) if body[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig", "gb18030"):
        try:
            return body.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise InputError(f"{where} is not text that we can read", hint="save it as UTF-8, or as Parquet")


def _evenness(rows: Sequence[str], mark: str) -> int:
    """Columns that this separator gives in the first line, if it gives about as many in the others."""
    counts = [re.sub(r'"[^"]*"', "", line).count(mark) + 1 for line in rows if line.strip()]
    return counts[0] if counts and sum(count == counts[0] for count in counts) >= 0.8 * len(counts) else 0


def _named(separator: str) -> str:
    return {"\t": "tabs", ";": "semicolons", "|": "vertical bars"}.get(separator, repr(separator))


def _numeric(text: str) -> bool:
    try:
        float(text.strip().strip('"').replace(",", "."))
    except ValueError:
        return False
    return True


# --- numbers ---------------------------------------------------------------------------------------------------------


def parse_numbers(values: Any, lines: Sequence[int], column: str, where: str) -> tuple[Any, list[str]]:
    """A column as numbers. Missing ones become NaN (`check` names them); words raise InputError with their line."""
    import numpy as np

    pandas = require_pandas()
    if pandas.api.types.is_numeric_dtype(values):
        return values.astype(float).reset_index(drop=True), []
    text = values.astype(str).str.strip()
    missing = text.str.lower().isin(["", "nan", "na", "n/a", "null", "none", "-", "--", "nat"])
    numbers = pandas.to_numeric(text.where(~missing), errors="coerce").astype(float)
    bad = np.flatnonzero((numbers.isna() & ~missing).to_numpy())
    if not len(bad):
        return numbers.reset_index(drop=True), []
    ways: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("a decimal comma", lambda s: s.str.replace(".", "", regex=False).str.replace(",", ".", regex=False)),
        ("commas between thousands", lambda s: s.str.replace(",", "", regex=False)),
        ("signs and suffixes such as $ and 1.5M", _scaled),
    )
    for words, change in ways:
        numbers = pandas.to_numeric(change(text.where(~missing)), errors="coerce").astype(float)
        if not (numbers.isna() & ~missing).any() and _plausible(words, text):
            return numbers.reset_index(drop=True), [f"column {column!r} is read with {words}"]
    raise InputError(
        f"{where}, line {lines[int(bad[0])]}, column {column!r}: {text.iloc[int(bad[0])]!r} is not a number",
        hint="mend that line, or name another column with --columns",
    )


def _plausible(words: str, text: Any) -> bool:
    """ "1,234" alone could be either: a comma is a decimal one unless every comma is followed by three digits."""
    if words != "a decimal comma":
        return True
    return not text[text.str.contains(",", regex=False)].str.fullmatch(r"[^,]*(,\d{3})+(\.\d+)?").all()


def _scaled(text: Any) -> Any:
    parts = text.str.replace(r"[\s,$€£¥%]", "", regex=True).str.extract(r"^([-+.\deE]+?)([kKmMbBtT万亿]?)$")
    scale = parts[1].str.lower().map({**SUFFIXES, "": 1.0})
    return require_pandas().to_numeric(parts[0], errors="coerce") * scale
