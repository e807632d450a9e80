"""Files and folders for `anytorch port`: read, rewrite, compare, write."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

from anytorch.errors import UsageError
from anytorch.run.port.rewrite import Ported, port

SKIPPED = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist", ".tox", "site-packages"})


@dataclass(frozen=True)
class Result:
    """What became of one file. `problem` says why it was left as it is; then `ported` is None."""

    path: Path
    before: str
    ported: Ported | None
    problem: str = ""

    @property
    def changed(self) -> bool:
        return self.ported is not None and self.ported.text != self.before

    @property
    def names_a_vendor(self) -> bool:
        """True if something was rewritten or left: the file as it is names CUDA."""
        return self.ported is not None and bool(self.ported.changes or self.ported.left)

    def diff(self) -> str:
        """A unified diff, "" without changes."""
        if self.ported is None:
            return ""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.ported.text.splitlines(keepends=True),
            f"a/{self.path.as_posix().lstrip('/')}",
            f"b/{self.path.as_posix().lstrip('/')}",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def sources(named: Sequence[Path]) -> Iterator[Path]:
    """The Python files among what was named, and below folders. Raises UsageError for what is not there."""
    for path in named:
        if path.is_dir():
            found = sorted(path.rglob("*.py"))
            yield from (file for file in found if not SKIPPED & set(file.relative_to(path).parts))
        elif path.exists():
            yield path
        else:
            raise UsageError(f"there is no file or folder {path}", hint="name Python files or folders that have some")


def port_file(path: Path) -> Result:
    """Rewrite one file's text; the file itself is not touched."""
    try:
        with path.open(encoding="utf-8", newline="") as file:  # newlines stay as they are
            before = file.read()
    except (OSError, UnicodeDecodeError) as exc:
        return Result(path, "", None, f"cannot be read: {exc}")
    try:
        return Result(path, before, port(before))
    except cst.ParserSyntaxError as exc:
        return Result(path, before, None, f"is not Python that LibCST understands: line {exc.raw_line}: {exc.message}")


def write(result: Result) -> None:
    """Write the rewritten text to the file, if it is another one."""
    if result.changed and result.ported is not None:
        with result.path.open("w", encoding="utf-8", newline="") as file:
            file.write(result.ported.text)
