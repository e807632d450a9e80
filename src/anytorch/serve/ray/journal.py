"""Which parts of a file are finished when they come in any order. The folder is that of `engines.embed.files_journal`.

    .<target>.partial/
      journal.json              {"format": 2, "identity": …, "parts": {"17": {"rows", "missing", "nbytes"}}}
      part-000017.parquet …     written under another name, synced, then renamed by the worker that made them
      lock                      held by the driver

A journal of format 1 (parts in order, of `encode_file`) is gone on with; the other way round it is refused there.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from anytorch import logs
from anytorch.engines.embed.files_journal import Identity, differences, hold_lock, partial_folder
from anytorch.errors import UsageError
from anytorch.files import replace_file

log = logs.logger(__name__)

FORMAT, IN_ORDER = 2, 1


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


class ScatteredJournal:
    """A context manager: it holds the lock. `parts`: the finished ones by their number."""

    def __init__(self, target: Path, identity: Identity, *, resume: bool) -> None:
        self.target, self.identity, self.folder = target, identity, partial_folder(target)
        self.parts: dict[int, dict[str, int]] = {}
        self._resume = resume
        self._lock: IO[bytes] | None = None

    @property
    def rows(self) -> int:
        return sum(part["rows"] for part in self.parts.values())

    @property
    def missing(self) -> int:
        return sum(part["missing"] for part in self.parts.values())

    def __enter__(self) -> ScatteredJournal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("wb")
        try:
            hold_lock(self._lock, self.target)
            self._open()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        self._lock.close()

    def _open(self) -> None:
        stored = self._stored() if self._resume else None
        if stored is not None:
            changed = differences(stored["identity"], self.identity)
            if changed:
                raise UsageError(
                    f"{self.target} has an unfinished run that cannot be gone on with: {'; '.join(changed)}",
                    hint="resume=False (on the command line --no-resume) starts afresh and drops what is finished",
                )
            for number, part in stored["parts"].items():
                path = part_path(self.folder, number)
                if path.is_file() and path.stat().st_size == part["nbytes"]:
                    self.parts[number] = part
                else:
                    log.warning("%s is damaged; it is computed again", path)
        kept = {part_path(self.folder, number).name for number in self.parts} | {"lock", "journal.json"}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()
        self._write()

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / "journal.json"
        try:
            stored: dict[str, Any] = json.loads(path.read_bytes())
            parts = stored["parts"]
            if stored["format"] == IN_ORDER:
                parts = dict(enumerate(parts))
            elif stored["format"] != FORMAT:
                raise ValueError("of another format")
            return {"identity": stored["identity"], "parts": {int(number): part for number, part in parts.items()}}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise UsageError(f"{path}: cannot be understood: {exc}", hint="resume=False starts afresh") from exc

    def add(self, number: int, rows: int, missing: int, nbytes: int) -> None:
        self.parts[number] = {"rows": rows, "missing": missing, "nbytes": nbytes}
        self._write()

    def _write(self) -> None:
        parts = {str(number): part for number, part in sorted(self.parts.items())}
        body = {"format": FORMAT, "identity": self.identity, "parts": parts}
        replace_file(self.folder / "journal.json", json.dumps(body, indent=1).encode())
