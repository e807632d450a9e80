"""Rows of a file with a column of texts: Parquet, CSV, JSON Lines or plain text, a chunk at a time, any size.

Rows are numbered from 1, as a person counts them; a CSV's header is no row. Chunks have exactly the size that is asked
for, wherever the file's own blocks end, so that a run that was interrupted cuts the same chunks again.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa  # type: ignore[import-untyped]

from anytorch.errors import InputError, UsageError, did_you_mean

# The longest field of a CSV is Python's own limit otherwise, 128 KiB: a book is a text, too.
SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
LONGEST_FIELD = 1 << 30
COUNTED_NBYTES = 256 << 20  # larger files are not read once more only to know how many rows they have
FORMATS = ("parquet", "csv", "tsv", "jsonl", "txt")
ENDINGS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "txt",
    ".text": "txt",
    ".md": "txt",
    ".rst": "txt",
    ".log": "txt",
}
USUAL_NAMES = ("text", "texts", "sentence", "content", "body", "document", "passage")


class Chunk(NamedTuple):
    first: int  # number of its first row
    texts: list[str | None]  # None: the row has none, and that was allowed
    table: Any  # pyarrow.Table with all columns of the file


class Source:
    """A file that can be read from any row. `column` is the one that holds the texts."""

    def __init__(
        self,
        path: Path,
        column: str | None,
        *,
        format: str | None = None,
        allow_missing: bool = False,
        any_column: bool = False,
    ) -> None:
        """`any_column`: for a caller that reads the table, take the first column where it is not clear which is meant."""
        self.path = path
        self.asked, self.any_column = column, any_column
        if path.is_dir():
            raise InputError(f"{path}: is a folder, not a file of texts")
        self.format = file_format(path, format)
        self.allow_missing = allow_missing
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        reader: Callable[[Source], _Reader] = {"parquet": _Parquet, "jsonl": _JsonLines, "txt": _Lines}.get(
            self.format, _Csv
        )
        self._reader = reader(self)
        self.columns = self._reader.columns
        self.column = self._reader.choose(column)
        self.total = self._reader.total

    def chunks(self, rows: int, skip: int = 0) -> Iterator[Chunk]:
        """All rows after the first `skip`, `rows` at a time. Raises InputError that names the row and the column."""
        first = skip + 1
        for table, texts in self._reader.chunks(rows, skip):
            yield Chunk(first, [self._checked(text, first + place) for place, text in enumerate(texts)], table)
            first += len(texts)

    def _checked(self, value: object, row: int) -> str | None:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as exc:
                raise self.bad(
                    row, f"holds a lone surrogate (U+{ord(value[exc.start]):04X}), which is not a character"
                ) from exc
            return value
        if value is None and self.allow_missing:
            return None
        shown = "is missing (null)" if value is None else f"is {type(value).__name__}, not text: {str(value)[:60]!r}"
        raise self.bad(row, shown, hint="missing='null' writes no vector for such rows" if value is None else "")

    def bad(self, row: int, what: str, *, hint: str = "", line: int | None = None) -> InputError:
        where = f"row {row}" + (f" (line {line})" if line not in (None, row) else "")
        return InputError(f"{self.path.name}: {where}, column {getattr(self, 'column', None)!r} {what}", hint=hint)


def file_format(path: Path, asked: str | None = None) -> str:
    if asked is not None:
        if asked not in FORMATS:
            raise UsageError(f"format={asked!r} is not one of {', '.join(FORMATS)}")
        return asked
    name = path.name.lower().removesuffix(".gz")
    found = ENDINGS.get(Path(name).suffix)
    if found is None or (found == "parquet" and path.name.lower().endswith(".gz")):
        if not path.exists():
            raise InputError(f"{path}: no such file")
        raise UsageError(
            f"{path.name}: its name does not show a known format; known: {', '.join(ENDINGS)}, and all "
            "but Parquet with .gz",
            hint="name it: format='csv', 'tsv', 'jsonl', 'txt' or 'parquet' (--format on the command line)",
        )
    return found


class _Reader:
    """One format. `columns` are the file's, as far as its beginning tells."""

    columns: list[str]
    textual: list[str]  # those that can hold texts

    def __init__(self, source: Source) -> None:
        self.source = source

    def total(self) -> int | None:
        """The number of rows, where it is known or cheap to count."""
        raise NotImplementedError

    def chunks(self, rows: int, skip: int) -> Iterator[tuple[Any, list[Any]]]:
        raise NotImplementedError

    def choose(self, asked: str | None) -> str:
        name = self.source.path.name
        if asked is not None:
            if asked in self.columns:
                return asked
            raise InputError(
                f"{name}: there is no column {asked!r}; its columns: {', '.join(self.columns)}",
                hint=did_you_mean(asked, self.columns),
            )
        if len(self.textual) == 1:
            return self.textual[0]
        usual = [column for column in self.textual if column.lower() in USUAL_NAMES]
        if len(usual) == 1:
            return usual[0]
        if self.source.any_column and self.columns:
            return self.columns[0]
        raise InputError(
            f"{name}: name the column with the texts; its columns: {', '.join(self.columns) or 'none'}",
            hint=f"column={(self.textual or self.columns or ['text'])[0]!r}",
        )


class _Parquet(_Reader):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        import pyarrow.parquet as pq  # type: ignore[import-untyped]  # 30 ms, which only Parquet pays

        try:
            self._file = pq.ParquetFile(source.path)
            schema = self._file.schema_arrow
            self.columns = list(schema.names)
        except (pa.ArrowException, OSError, ValueError) as exc:  # names that are not UTF-8, too
            raise InputError(f"{source.path.name}: cannot be read as Parquet: {exc}") from exc
        self.textual = [field.name for field in schema if _holds_text(field.type)]

    def total(self) -> int | None:
        return int(self._file.metadata.num_rows)

    def chunks(self, rows: int, skip: int) -> Iterator[tuple[Any, list[Any]]]:
        facts = self._file.metadata
        group = 0
        while group < facts.num_row_groups and skip >= facts.row_group(group).num_rows:
            skip -= facts.row_group(group).num_rows
            group += 1
        groups = list(range(group, facts.num_row_groups))
        left = sum(facts.row_group(number).num_rows for number in groups)
        # Batches end where row groups do: they are put together and cut anew.
        held = pa.Table.from_batches([], self._file.schema_arrow)
        try:
            for batch in self._file.iter_batches(batch_size=min(rows, 65536), row_groups=groups) if groups else ():
                fresh = pa.Table.from_batches([batch], self._file.schema_arrow)
                left -= len(fresh)
                dropped, skip = min(skip, len(fresh)), max(0, skip - len(fresh))
                held = pa.concat_tables([held, fresh.slice(dropped)])
                while len(held) >= rows:
                    yield self._cut(held.slice(0, rows))
                    held = held.slice(rows)
        except (pa.ArrowException, OSError) as exc:
            raise InputError(f"{self.source.path.name}: cannot be read to its end: {exc}") from exc
        if left:  # a damaged page can be an empty one to Arrow
            raise InputError(
                f"{self.source.path.name}: cannot be read to its end: {left} of the {facts.num_rows} rows that it says it "
                "has are not there",
                hint="the file is damaged: fetch or write it again",
            )
        if len(held):
            yield self._cut(held)

    def _cut(self, table: Any) -> tuple[Any, list[Any]]:
        try:
            return table.combine_chunks(), table.column(self.source.column).to_pylist()
        except UnicodeDecodeError as exc:  # Parquet itself does not look at what a text holds
            words = f"column {self.source.column!r} holds bytes that are not UTF-8: {exc.reason}"
            raise InputError(f"{self.source.path.name}: {words}", hint="write the file again") from exc


def _holds_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view")


class _TextReader(_Reader):
    """Formats that are read row by row as text."""

    def open(self) -> IO[str]:
        path = self.source.path
        try:
            raw: Any = gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # noqa: SIM115
        except OSError as exc:
            raise InputError(f"{path.name}: cannot be read: {exc.strerror or exc}") from exc
        try:
            encoding = _encoding(raw.peek(4))
        except (EOFError, gzip.BadGzipFile, zlib.error, OSError):
            encoding = "utf-8-sig"  # said when the first line is read
        # Line ends stay as they are for the CSV reader.
        return io.TextIOWrapper(raw, encoding=encoding, newline="" if self.keeps_line_ends else None)

    keeps_line_ends = False

    def rows(self) -> Iterator[Any]:
        raise NotImplementedError

    def table(self, rows: list[Any]) -> tuple[Any, list[Any]]:
        raise NotImplementedError

    def total(self) -> int | None:
        if self.source.path.name.lower().endswith(".gz") or self.source.path.stat().st_size > COUNTED_NBYTES:
            return None
        try:
            return sum(1 for _ in self.rows())
        except InputError:
            return None  # said when it is reached: the rows before it are good

    def chunks(self, rows: int, skip: int) -> Iterator[tuple[Any, list[Any]]]:
        found = self.rows()
        next(islice(found, skip, skip), None)
        while some := list(islice(found, rows)):
            yield self.table(some)

    def decoded(self, lines: IO[str]) -> Iterator[str]:
        """Lines, with a bad byte named by its line."""
        number = 0
        while True:
            try:
                line = lines.readline()
            except UnicodeDecodeError as exc:
                encoding = "UTF-8" if exc.encoding.startswith("utf-8") else exc.encoding.upper()
                raise InputError(
                    f"{self.source.path.name}: after line {number} there is a byte that is not {encoding} "
                    f"({exc.object[exc.start : exc.start + 1]!r})",
                    hint="write the file again as UTF-8, or convert it from the encoding that it has: iconv -f … -t utf-8",
                ) from exc
            except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as exc:
                raise InputError(f"{self.source.path.name}: cannot be read after line {number}: {exc}") from exc
            if not line:
                return
            number += 1
            yield line


def text_of_file(path: Path, most_nbytes: int) -> str:
    """The text of a file, decoded by its byte order mark or as UTF-8. Raises InputError for all other bytes."""
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        raw = file.read(most_nbytes + 1)  # a small .gz can hold very much
    if len(raw) > most_nbytes:
        raise InputError(f"{path.name}: larger than {most_nbytes >> 20} MiB")
    encoding = _encoding(raw[:4])
    if encoding == "utf-8-sig" and b"\0" in raw[:8192]:
        raise InputError(f"{path.name}: is not text")
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as exc:
        raise InputError(f"{path.name}: is not {exc.encoding.upper()}", hint="write it again as UTF-8") from exc


def _encoding(begin: bytes) -> str:
    """The encoding that the byte order mark at the beginning names; UTF-8 without one. The mark is no part of the text."""
    for mark, name in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
    ):
        if begin.startswith(mark):
            return name
    return "utf-16" if begin.startswith(codecs.BOM_UTF16_BE) else "utf-8-sig"


class _Lines(_TextReader):
    """Plain text: every line is a text, an empty one too."""

    columns = textual = ["text"]  # noqa: RUF012

    def rows(self) -> Iterator[Any]:
        with self.open() as lines:
            for line in self.decoded(lines):
                yield line.removesuffix("\n")

    def table(self, rows: list[Any]) -> tuple[Any, list[Any]]:
        return pa.table({"text": pa.array(rows, pa.string())}), rows


class _Csv(_TextReader):
    """Separated by commas, by semicolons where the header has those and no comma (as spreadsheets write it where the comma
    is in numbers), or by tabs. Every column stays the text it is: "007" is not 7, and no row can have a wrong type."""

    keeps_line_ends = True

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._delimiter = "\t" if source.format == "tsv" else ","
        header = self._header()
        if self._delimiter == "," and header is not None and len(header) == 1 and ";" in header[0]:
            self._delimiter = ";"
            header = self._header()
        if header is None:  # an empty file has no rows, as an empty text file
            header = [source.asked or "text"]
        if len(set(header)) < len(header):
            raise InputError(f"{source.path.name}: its header names a column twice: {', '.join(header)}")
        self.columns = self.textual = header

    def _header(self) -> list[str] | None:
        csv.field_size_limit(LONGEST_FIELD)
        with self.open() as lines:
            try:
                return next(csv.reader(self.decoded(lines), delimiter=self._delimiter, strict=True), None)
            except csv.Error as exc:
                raise InputError(f"{self.source.path.name}: its header cannot be read: {exc}") from exc

    def rows(self) -> Iterator[Any]:
        csv.field_size_limit(LONGEST_FIELD)
        with self.open() as lines:
            reader = csv.reader(self.decoded(lines), delimiter=self._delimiter, strict=True)
            next(reader, None)  # the header, which could be read
            row = 0
            try:
                for fields in reader:
                    if not fields:
                        continue  # an empty line is no row, as for every reader of CSV
                    row += 1
                    if len(fields) != len(self.columns):
                        raise self.source.bad(
                            row,
                            f"is ambiguous: the row has {len(fields)} fields, the header {len(self.columns)}",
                            line=reader.line_num,
                            hint=f"put a text with {SEPARATORS[self._delimiter]} or a line break in quotes",
                        )
                    yield fields
            except csv.Error as exc:
                raise self.source.bad(row + 1, f"cannot be read: {exc}", line=reader.line_num) from exc

    def table(self, rows: list[Any]) -> tuple[Any, list[Any]]:
        by_column = list(zip(*rows, strict=True))
        table = pa.table({n: pa.array(v, pa.string()) for n, v in zip(self.columns, by_column, strict=True)})
        return table, list(by_column[self.columns.index(self.source.column)])


class _JsonLines(_TextReader):
    """A JSON object on every line. Columns are those of all objects together; blank lines are no rows."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        first: dict[str, Any] = {}
        for some in islice(self.rows(), 20):
            first = {**first, **{name: value for name, value in some.items() if value is not None or name not in first}}
        self.columns = list(first) or [source.asked or "text"]
        self.textual = [name for name, value in first.items() if isinstance(value, str)] or self.columns[:1]

    def rows(self) -> Iterator[Any]:
        row = 0
        with self.open() as lines:
            for number, line in enumerate(self.decoded(lines), 1):
                if line.isspace():
                    continue
                row += 1
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as exc:
                    raise self.source.bad(row, f"cannot be read: not valid JSON: {exc}", line=number) from exc
                if not isinstance(value, dict):
                    raise self.source.bad(row, f"cannot be read: {type(value).__name__}, not an object", line=number)
                try:
                    "".join(value).encode()
                except UnicodeEncodeError as exc:
                    words = "cannot be read: a name in its object holds a lone surrogate, which is not a character"
                    raise self.source.bad(row, words, line=number) from exc
                yield value

    def table(self, rows: list[Any]) -> tuple[Any, list[Any]]:
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = {}
        for name in names:
            values = [row.get(name) for row in rows]
            try:
                columns[name] = pa.array(values)
            except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # of several kinds: kept as JSON text
                columns[name] = pa.array([as_text(value) for value in values], pa.string())
        return pa.table(columns), [row.get(self.source.column) for row in rows]


def as_text(value: Any) -> str | None:
    """A value that shares its column with others of another kind: text stays, anything else becomes JSON."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode()
