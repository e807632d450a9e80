"""Files of a folder → passages that a search can answer with: text, Markdown, source, tables, and PDF where a library is.

A passage is a few paragraphs, a piece of a program, or a row of a table, with the line (row, page) where it begins. What
is a file of texts is told by its ending; folders that hold no one's notes (.git, node_modules, …) are passed by.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from anytorch.errors import AnytorchError, InputError
from anytorch.files import parse_json
from anytorch.text.embed.files_read import ENDINGS, Source, text_of_file

MOST_CHARACTERS = 1200  # about 250 tokens: what small models read of a text
MOST_NBYTES = 32 << 20  # of one file: more is data, not notes
MOST_FILES = 200_000
SOURCES = {
    *(
        ".py",
        ".pyi",
        ".ipynb",
        ".js",
        ".mjs",
        ".ts",
        ".tsx",
        ".jsx",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cu",
        ".cuh",
        ".rs",
    ),
    *(
        ".go",
        ".java",
        ".kt",
        ".swift",
        ".rb",
        ".php",
        ".cs",
        ".scala",
        ".sh",
        ".bash",
        ".zsh",
        ".ps1",
        ".sql",
        ".r",
        ".jl",
    ),
    *(
        ".lua",
        ".pl",
        ".m",
        ".wgsl",
        ".glsl",
        ".toml",
        ".yaml",
        ".yml",
        ".ini",
        ".cfg",
        ".json",
        ".css",
        ".html",
        ".xml",
    ),
    *(".tex", ".org", ".adoc", ".cmake", ".gradle", ".proto"),
}
NAMED_SOURCES = {"makefile", "dockerfile", "readme", "license", "changelog", "notes", "todo"}
PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".log"}
TABLES = {ending for ending, kind in ENDINGS.items() if kind in ("csv", "tsv", "jsonl", "parquet")}
PASSED_BY = {"node_modules", "__pycache__", "venv", "env", "site-packages", "target", "build", "dist"}


class Passage(NamedTuple):
    text: str
    place: int  # the line, row, cell or page where it begins, from 1


class Skipped(NamedTuple):
    path: Path
    why: str


def files_in(folder: Path, skipped: list[Skipped]) -> Iterator[Path]:
    """The files below a folder that may hold texts, in a fixed order; links to folders are not followed.

    Folders that cannot be read are added to `skipped`.
    """

    def unreadable(exc: OSError) -> None:
        skipped.append(Skipped(Path(exc.filename), exc.strerror or str(exc)))

    count = 0
    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name.lower() not in PASSED_BY)
        for name in sorted(names):
            if name.startswith(".") or not is_text(name):
                continue
            count += 1
            if count > MOST_FILES:
                raise InputError(
                    f"{folder} holds more than {MOST_FILES:,} files of texts", hint="name a folder inside of it"
                )
            yield Path(place) / name


def is_text(name: str) -> bool:
    ending = Path(name.lower().removesuffix(".gz")).suffix
    if not ending:
        return name.lower() in NAMED_SOURCES
    return ending in PROSE or ending in SOURCES or ending in TABLES or ending == ".pdf"


def passages_of(path: Path) -> list[Passage]:
    """The passages of one file. Raises InputError with the reason for a file that has none to give."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe would be waited for, a device read without end
            raise InputError(f"{path.name}: is not a regular file")
        if facts.st_size > MOST_NBYTES:
            raise InputError(f"{path.name}: larger than {MOST_NBYTES >> 20} MiB", hint="embed it by itself")
        ending = Path(path.name.lower().removesuffix(".gz")).suffix
        if ending == ".pdf":
            found = [
                Passage(text, page) for page, whole in pdf_pages(path) for text, _ in paragraphs(whole.splitlines())
            ]
        elif ending in TABLES:
            found = rows_of(path)
        elif ending == ".ipynb":
            found = cells_of_notebook(path)
        else:
            lines = text_of_file(path, MOST_NBYTES).splitlines()
            cut = paragraphs if ending in PROSE else pieces
            found = [Passage(text, line) for text, line in cut(lines)]
    except (OSError, EOFError, zlib.error) as exc:
        raise InputError(f"{path.name}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    # JSON and PDF can hold lone surrogates, which no model and no file takes.
    cleaned = (Passage(text.encode("utf-8", "replace").decode(), place) for text, place in found)
    return [passage for passage in cleaned if passage.text.strip()]


# --- cutting: pure -------------------------------------------------------------------------------------------------------


def paragraphs(lines: list[str]) -> list[tuple[str, int]]:
    """Paragraphs with the line they begin at; short ones together, a heading with what follows, long ones in pieces."""
    found: list[tuple[list[str], int]] = []
    current: list[str] = []
    began = 1
    for number, line in enumerate(lines, 1):
        heading = line.startswith("#")
        if current and (not line.strip() or heading or size(current) + len(line) > MOST_CHARACTERS):
            found.append((current, began))
            current = []
        if line.strip():
            if not current:
                began = number
            current.append(line)
    if current:
        found.append((current, began))
    joined: list[tuple[list[str], int]] = []
    for part, at in found:
        before = joined[-1][0] if joined else []
        starts = part[0].startswith("#")
        if joined and not starts and size(before) + size(part) <= MOST_CHARACTERS // 2:
            joined[-1] = ([*before, "", *part], joined[-1][1])
        else:
            joined.append((part, at))
    return [one for part, at in joined for one in short_enough("\n".join(part), at)]


def pieces(lines: list[str]) -> list[tuple[str, int]]:
    """A program in pieces, cut where a line begins at the margin after a blank one, or where a piece is long enough."""
    found: list[tuple[str, int]] = []
    current: list[str] = []
    began, blank = 1, False
    for number, line in enumerate(lines, 1):
        margin = blank and bool(line) and not line[0].isspace() and line[0] not in ")]}"
        if current and (
            (margin and size(current) > MOST_CHARACTERS // 4) or size(current) + len(line) > MOST_CHARACTERS
        ):
            found += short_enough("\n".join(current), began)
            current = []
        blank = not line.strip()
        if current or not blank:
            if not current:
                began = number
            current.append(line)
    if current:
        found += short_enough("\n".join(current), began)
    return found


def short_enough(text: str, line: int) -> list[tuple[str, int]]:
    """The text, or its parts where it is one endless line: cut after a sentence, else between words, else anywhere."""
    found, at = [], 0
    while len(text) - at > 2 * MOST_CHARACTERS:
        window = text[at : at + MOST_CHARACTERS]
        ends = [match.end() for match in re.finditer(r"[.!?。！？]\s|\n", window)] or [window.rfind(" ") + 1]
        cut = ends[-1] if ends[-1] > MOST_CHARACTERS // 4 else MOST_CHARACTERS
        found.append((window[:cut], line))
        line += window[:cut].count("\n")
        at += cut
    return [*found, (text[at:], line)]


def size(lines: list[str]) -> int:
    return sum(len(line) + 1 for line in lines)


# --- notebooks, tables and PDF ----------------------------------------------------------------------------------------


def cells_of_notebook(path: Path) -> list[Passage]:
    """What a Jupyter notebook's cells say, by their numbers; what they printed and drew is left out."""
    text = text_of_file(path, MOST_NBYTES)
    try:
        document = parse_json(text)
        cells = [("".join(cell["source"]), cell["cell_type"]) for cell in document["cells"]]
    except (ValueError, KeyError, TypeError) as exc:
        raise InputError(f"{path.name}: is not a notebook of version 4") from exc
    return [
        Passage(text, number)
        for number, (source, kind) in enumerate(cells, 1)
        for text, _ in (pieces if kind == "code" else paragraphs)(source.splitlines())
    ]


def rows_of(path: Path) -> list[Passage]:
    """Each row of a table as one text: the column of texts where there is one that can be meant, else all its cells."""
    try:
        source = Source(path, None)
        return within_limit(path, texts_of(source))
    except AnytorchError:
        pass  # several columns may be meant, or a row has no text: then all cells count
    return within_limit(path, cells_of(Source(path, None, any_column=True)))


def texts_of(source: Source) -> Iterator[Passage]:
    for chunk in source.chunks(4096):
        for place, text in enumerate(chunk.texts):
            if text is not None:
                yield Passage(text, chunk.first + place)


def cells_of(source: Source) -> Iterator[Passage]:
    for chunk in source.chunks(4096):
        for place, row in enumerate(chunk.table.to_pylist()):
            cells = [f"{name}: {shown(value)}" for name, value in row.items() if shown(value)]
            yield Passage("; ".join(cells)[: 2 * MOST_CHARACTERS], chunk.first + place)


def within_limit(path: Path, rows: Iterator[Passage]) -> list[Passage]:
    """The rows. Raises InputError where they are too many: a compressed file does not tell it by its size."""
    found, room = [], MOST_NBYTES
    for row in rows:
        room -= len(row.text)
        if room < 0:
            raise InputError(f"{path.name}: larger than {MOST_NBYTES >> 20} MiB", hint="embed it by itself")
        found.append(row)
    return found


def shown(value: Any) -> str:
    """A cell as text; "" for an empty one and for vectors, which say nothing to a reader."""
    return "" if value is None or isinstance(value, (list, dict, bytes)) else str(value).strip()


def pdf_pages(path: Path) -> list[tuple[int, str]]:
    """(page, its text), by pypdf or PyMuPDF, whichever is installed. Raises InputError where neither is."""
    try:
        import pypdf  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        pypdf = None
    if pypdf is not None:
        try:
            reader = pypdf.PdfReader(path)
            return [(number, page.extract_text() or "") for number, page in enumerate(reader.pages, 1)]
        except Exception as exc:
            raise InputError(f"{path.name}: cannot be read as PDF: {exc}") from exc
    try:
        import pymupdf  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as exc:
        raise InputError(f"{path.name}: reading PDF needs a library", hint="pip install pypdf") from exc
    try:
        with pymupdf.open(path) as document:
            return [(number, page.get_text()) for number, page in enumerate(document, 1)]
    except Exception as exc:
        raise InputError(f"{path.name}: cannot be read as PDF: {exc}") from exc
