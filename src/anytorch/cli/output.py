"""A command's output: data on standard output; warnings, progress and hints on standard error.

With `--json` standard output holds exactly one JSON document. Tables are drawn by rich on a terminal and are plain
aligned columns anywhere else; rich is imported only to draw one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TextIO

from anytorch.counts import counted

if TYPE_CHECKING:
    from anytorch.devices.bench import Progress

Row = Sequence[object]
TRYING = "trying the devices, each in a process of its own; the result is kept until something changes"


class Unwritable(Exception):
    """The answer could not be written to standard output: it is closed (`>&-`) or the disk is full."""


class Output:
    """The two streams of one command. `json` and `verbose` are the global options."""

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose
        self._held = False  # does `kept_clean` hold standard output back …
        self._document: TextIO | None = None  # … then `data` goes here; None: it is closed

    @contextmanager
    def kept_clean(self) -> Iterator[None]:
        """With --json, whatever else prints in this block (a plug-in, a library) prints to standard error."""
        if not self.json:
            yield
            return
        self._held, self._document = True, sys.stdout
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            sys.stdout, self._document, self._held = self._document, None, False

    # --- data ------------------------------------------------------------------------------------------------------

    def data(self, value: Any) -> None:
        """The answer as one JSON document."""
        from json import dumps

        from anytorch.probe.facts import as_json

        document = dumps(finite(as_json(value)), indent=2, ensure_ascii=False, default=str)
        # Written out at once: whoever started a service with --json waits for its first document, through a pipe.
        answer(self._document if self._held else sys.stdout, f"{document}\n", end="")

    def text(self, line: str = "") -> None:
        """Print a line of the answer for people. Does nothing in JSON mode, where the document is the whole answer."""
        if not self.json:
            answer(sys.stdout, line)

    def answer(self, document: Any, *lines: str) -> None:
        """The whole of a short answer: the document for programs, the lines for people."""
        if self.json:
            self.data(document)
        for line in lines:
            self.text(line)

    def piece(self, text: str) -> None:
        """Print a piece of a streamed text at once, without a line end."""
        if not self.json:
            answer(sys.stdout, text, end="")

    def heading(self, title: str) -> None:
        if self.json:
            return
        answer(sys.stdout, f"\n\033[1m{title}\033[0m" if decorated(sys.stdout) else f"\n{title}")

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
        """A table of the answer. Columns whose title ends in ")" (a unit) hold numbers and are aligned to the right.

        In a narrow terminal the words of a title stand below each other, and then the boxes go.
        """
        if self.json:
            return
        cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
        room = self.room
        boxed, folded = layout(columns, cells, room, boxes=decorated(sys.stdout))
        if boxed:
            _rich_table(title, columns, cells, folded, room)
            return
        if title:
            from textwrap import fill

            self.heading(fill(title, room) if room else title)
        for line in aligned(columns, cells, folded=folded):
            answer(sys.stdout, line)

    @property
    def room(self) -> int | None:
        """Terminal width in characters; None if standard output is not a terminal."""
        if self.json or not is_terminal(sys.stdout):
            return None
        from shutil import get_terminal_size

        return get_terminal_size().columns

    # --- words -----------------------------------------------------------------------------------------------------

    def note(self, words: str) -> None:
        """Print a line on standard error, beside the answer."""
        say(words)

    def warn(self, words: str) -> None:
        say(f"warning: {words}")

    def error(self, message: str, hint: str = "", *, kind: str = "", reasons: Sequence[str] = ()) -> None:
        """The one clear message of a failed command; in JSON mode it is the document on standard output, too."""
        say(f"error: {message}")
        if hint:
            say(f"hint: {hint}")
        if self.json:
            told: dict[str, Any] = {"type": kind, "message": message, "hint": hint}
            if reasons:
                told["reasons"] = list(reasons)
            try:
                self.data({"error": told})
            except Unwritable:
                return  # the words above have told it; its own exit status says more than that of a full disk

    @contextmanager
    def progress(self, title: str) -> Iterator[Progress]:
        """A bar on standard error while something long runs. Off a terminal, a line every half minute, and none about
        what is done sooner."""
        if not decorated(sys.stderr):
            pace = Pace(title)

            def tell(done: int, total: int, what: str) -> None:
                if line := pace.at(done, total, what):
                    say(line)

            yield tell
            return
        bar, task = _rich_bar(title)
        with bar:

            def show(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=f"{title}: {what}" if what else title)

            yield show

    @contextmanager
    def waiting(self, what: str, *, after_s: float = 2.0, every_s: float = 15.0) -> Iterator[None]:
        """Say on standard error what is being waited for, where the block takes longer than a moment."""
        from threading import Event, Thread

        over, began = Event(), time.monotonic()

        def tell() -> None:
            pause, line = after_s, f"{what} …"
            while not over.wait(pause):
                say(line)
                pause = every_s
                line = f"{what}: {time.monotonic() - began + every_s:.0f} s so far …"

        teller = Thread(target=tell, name="anytorch-waiting", daemon=True)
        teller.start()
        try:
            yield
        finally:
            over.set()
            teller.join()

    @contextmanager
    def fallbacks_told(self) -> Iterator[list[str]]:
        """Inside, a device that is not the requested one is a line on standard error; the list collects the texts."""
        from anytorch.devices.choose import fallbacks_to

        told: list[str] = []

        def tell(words: str) -> None:
            if words not in told:
                told.append(words)
                self.warn(words)

        with fallbacks_to(tell):
            yield told


def finite(value: Any) -> Any:
    """The value with NaN and infinities as None, because JSON has no word for them."""
    if isinstance(value, float) and value - value != 0.0:
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return value


def decorated(stream: TextIO | None) -> bool:
    """True if this stream may get colours and boxes: a terminal that did not ask for plain text."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and is_terminal(stream)


def is_terminal(stream: TextIO | None) -> bool:
    if stream is None:
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool = False) -> Iterator[str]:
    """Plain columns, two spaces apart, with a rule under the titles; the last column is never padded.

    `folded`: the words of a title stand below each other.
    """
    widths = widths_of(columns, rows, folded)

    def line(cells: Sequence[str]) -> str:
        shown = [
            cell.rjust(width) if numeric(title) else cell.ljust(width)
            for cell, width, title in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(shown).rstrip()

    words = [title.split() if folded else [title] for title in columns]
    height = max(map(len, words), default=0)
    for place in range(height):  # a title with fewer words ends above the rule, too
        yield line([found[place - height] if height - place <= len(found) else "" for found in words])
    yield "  ".join("-" * width for width in widths)
    for row in rows:
        yield line(row)


def layout(
    columns: Sequence[str], rows: Sequence[Sequence[str]], room: int | None, *, boxes: bool
) -> tuple[bool, bool]:
    """How to lay out the table (boxes or plain, folded titles or whole): the best that fits in `room`."""
    ways = [(boxed, folded) for boxed in ((True, False) if boxes else (False,)) for folded in (False, True)]
    for boxed, folded in ways:
        if room is None or width_of(columns, rows, boxed=boxed, folded=folded) <= room:
            return boxed, folded
    return ways[0]  # nothing is: rich folds what is in the boxes, and a terminal its lines


def widths_of(columns: Sequence[str], rows: Sequence[Sequence[str]], folded: bool) -> list[int]:
    words = [title.split() if folded else [title] for title in columns]
    return [max([*map(len, words[n]), *(len(row[n]) for row in rows)], default=0) for n in range(len(columns))]


def width_of(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, folded: bool = False, boxed: bool = False
) -> int:
    """Characters in a line of a table."""
    inside = sum(widths_of(columns, rows, folded))
    return inside + 3 * len(columns) + 1 if boxed else inside + 2 * (len(columns) - 1)


def numeric(title: str) -> bool:
    return title.endswith(")")


def _rich_bar(title: str) -> tuple[Any, Any]:
    """A bar of rich that is not shown yet, and its task."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    left = TimeRemainingColumn(compact=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"), left)
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    return bar, bar.add_task(title, total=None)


def _rich_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], folded: bool, room: int | None
) -> None:
    """Draw the table with rich. Cells are folded only if the table exceeds `room`."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    fits = room is None or width_of(columns, rows, boxed=True, folded=folded) <= room
    table = Table(title=Text(title) if title else None, title_justify="left", header_style="bold")
    for column in columns:
        shown = "\n".join(column.split()) if folded else column
        justify: Literal["left", "right"] = "right" if numeric(column) else "left"
        table.add_column(shown, justify=justify, overflow="fold", no_wrap=fits)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a device's name may look like rich's markup
    Console(width=room).print(table)  # what the layout was made for, whatever rich would measure


def answer(stream: TextIO | None, line: str, end: str = "\n") -> None:
    """Write one line of the answer. Raises Unwritable if that fails, BrokenPipeError if its reader is gone."""
    if stream is None:
        raise Unwritable("it is closed")
    try:
        write(stream, line, end)
        if not end:
            stream.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise Unwritable(exc.strerror or str(exc)) from exc


def say(line: str) -> None:
    """Write one line to standard error; ignore a stream that is closed or full."""
    if sys.stderr is None:
        return
    try:
        write(sys.stderr, line)
    except BrokenPipeError:
        raise
    except OSError:
        return


def write(stream: TextIO, line: str, end: str = "\n") -> None:
    """One line to a stream."""
    try:
        stream.write(line + end)
    except UnicodeEncodeError:  # a terminal or pipe that is not UTF-8: say what can be said
        encoding = stream.encoding or "ascii"
        stream.write((line + end).encode(encoding, "replace").decode(encoding))


def gigabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"


# --- progress lines where no bar can be shown: an estimate after the first steps, then a line now and then ------------

MEASURED_S = 3.0  # of the first steps, before the rest is guessed from them
LONG_S = 60.0  # work with less than this before it is not worth a guess
EVERY_S = 30.0


class Pace:
    """Tracks long work: `at` takes the progress and returns a line to print, or "".

    The measuring starts with the first call that has a step behind it: what lies before it (loading, compiling) is not done
    again. Later guesses go by the steps since the last line alone, because steps may become dearer on the way. Work whose
    step lasts long, and that reports meanwhile, gets its lines too, without a guess.
    """

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.title, self.clock = title, clock
        self.mark: tuple[int, float] | None = None  # steps and time, from which the next guess is made
        self.guessed = False
        self.spoke: float | None = None  # when the last line but the first guess was printed, or the work began

    def at(self, done: int, total: int, what: str = "") -> str:
        now = self.clock()
        if self.spoke is None:
            self.spoke = now
        if self.mark is None or done < self.mark[0]:  # or other work under the same title
            self.mark = (done, now) if done else None
        due = now - self.spoke >= EVERY_S
        before, since = self.mark or (done, now)
        passed = now - since
        left = passed / (done - before) * (total - done) if passed >= MEASURED_S and before < done < total else None
        if left is not None and not self.guessed:
            self.guessed = True  # and the mark stays: the next line comes half a minute after the first step
            return f"{self.title}: this takes about {duration(left)}" if left >= LONG_S else ""
        if not due or (left is None and done == total and not what):
            return ""
        self.spoke = now
        detail = f", {what}" if what else ""
        line = f"{self.title}: {done:,} of {total:,}{detail}"
        if left is None:
            return line
        self.mark = (done, now)
        return f"{line}; about {duration(left)} left"


def duration(seconds: float) -> str:
    """A duration in the unit a person would use: "40 seconds", "3 minutes", "5 hours", "12 days"."""
    for unit, size, next_size in (("second", 1, 60), ("minute", 60, 3600), ("hour", 3600, 86400)):
        if seconds < 1.5 * next_size:
            return counted(max(1, round(seconds / size)), unit)
    return counted(round(seconds / 86400), "day")
