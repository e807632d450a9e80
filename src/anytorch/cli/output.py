"""Where words and data go: data to standard output, words (warnings, progress, hints) to standard error.

With `--json` standard output holds exactly one JSON document. Tables are drawn by rich on a terminal and are plain
aligned columns anywhere else; rich is imported only to draw one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from anytorch.devices.bench import Progress

Row = Sequence[object]


class Output:
    """The two streams of one command. `json` and `verbose` are the global options."""

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose
        self._document: TextIO | None = None  # where `data` goes while `kept_clean` holds standard output

    @contextmanager
    def kept_clean(self) -> Iterator[None]:
        """With --json, whatever else prints in this block (a plug-in, a library) prints to standard error."""
        if not self.json:
            yield
            return
        self._document = sys.stdout
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            sys.stdout, self._document = self._document, None

    # --- data ------------------------------------------------------------------------------------------------------

    def data(self, value: Any) -> None:
        """The answer as one JSON document."""
        from json import dumps

        from anytorch.probe.facts import as_json

        write(self._document or sys.stdout, dumps(finite(as_json(value)), indent=2, ensure_ascii=False, default=str))

    def text(self, line: str = "") -> None:
        """A line of the answer, for people. Nothing in JSON mode: there the document is the whole answer."""
        if not self.json:
            write(sys.stdout, line)

    def heading(self, title: str) -> None:
        if self.json:
            return
        if decorated(sys.stdout):
            write(sys.stdout, f"\n\033[1m{title}\033[0m")
        else:
            write(sys.stdout, f"\n{title}")

    def pairs(self, rows: Sequence[tuple[str, object]], *, indent: int = 2) -> None:
        """Aligned "name   value" lines; a value that is not known is left out."""
        known = [(name, str(value)) for name, value in rows if value not in (None, "")]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            lines = value.splitlines() or [""]
            self.text(f"{' ' * indent}{name.ljust(width)}  {lines[0]}")
            for line in lines[1:]:
                self.text(f"{' ' * (indent + width + 2)}{line}")

    def table(self, columns: Sequence[str], rows: Sequence[Row], *, title: str = "") -> None:
        """A table of the answer. Columns whose title ends in ")" (a unit) hold numbers and are aligned to the right."""
        if self.json:
            return
        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        if decorated(sys.stdout) and _rich_table(title, columns, cells):
            return
        if title:
            self.heading(title)
        for line in aligned(columns, cells):
            write(sys.stdout, line)

    # --- words -----------------------------------------------------------------------------------------------------

    def note(self, words: str) -> None:
        """Something to read beside the answer."""
        write(sys.stderr, words)

    def warn(self, words: str) -> None:
        write(sys.stderr, f"warning: {words}")

    def error(self, message: str, hint: str = "", *, kind: str = "", reasons: Sequence[str] = ()) -> None:
        """The one clear message of a failed command; in JSON mode it is the document on standard output, too."""
        if self.json:
            told: dict[str, Any] = {"type": kind, "message": message, "hint": hint}
            if reasons:
                told["reasons"] = list(reasons)
            self.data({"error": told})
        write(sys.stderr, f"error: {message}")
        if hint:
            write(sys.stderr, f"hint: {hint}")

    @contextmanager
    def progress(self, title: str) -> Iterator[Progress | None]:
        """A bar on standard error while something long runs; None (nobody to show it to) off a terminal."""
        if not decorated(sys.stderr):
            yield None
            return
        try:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress
        except ModuleNotFoundError:
            yield None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=None)

            def show(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=f"{title}: {what}" if what else title)

            yield show

    @contextmanager
    def fallbacks_told(self) -> Iterator[list[str]]:
        """A DeviceFallbackWarning becomes a line on standard error; the list collects the texts for the document."""
        import warnings

        from anytorch.errors import DeviceFallbackWarning

        told: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DeviceFallbackWarning)
            try:
                yield told
            finally:
                others = []
                for warning in caught:
                    if not issubclass(warning.category, DeviceFallbackWarning):
                        others.append(warning)
                    elif str(warning.message) not in told:
                        told.append(str(warning.message))
                        self.warn(str(warning.message))
        for warning in others:  # not ours: handed on to whoever listens
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def finite(value: Any) -> Any:
    """NaN and infinities as null: Python would write words that are not JSON."""
    if isinstance(value, float) and value - value != 0.0:
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def decorated(stream: TextIO) -> bool:
    """May this stream get colours and boxes? Only a terminal, and not one that asked for plain text."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Plain columns, two spaces apart, with a rule under the titles; the last column is never padded."""
    widths = [max([len(title), *(len(row[n]) for row in rows)]) for n, title in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        shown = [
            cell.rjust(width) if numeric(title) else cell.ljust(width)
            for cell, width, title in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(shown).rstrip()

    yield line(columns)
    yield "  ".join("-" * width for width in widths)
    for row in rows:
        yield line(row)


def numeric(title: str) -> bool:
    return title.endswith(")")


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Draw it with rich. False if rich is not installed."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    table = Table(title=Text(title) if title else None, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if numeric(column) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a device's name may look like rich's markup
    Console().print(table)
    return True


def write(stream: TextIO, line: str) -> None:
    """One line to a stream."""
    try:
        stream.write(line + "\n")
    except UnicodeEncodeError:  # a terminal or pipe that is not UTF-8: say what can be said
        encoding = stream.encoding or "ascii"
        stream.write((line + "\n").encode(encoding, "replace").decode(encoding))


def gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"
