"""Which parts of a file are finished when they come in any order. The folder is that of `text.embed.files_journal`.

    .<target>.partial/
      journal.json              {"format": 2, "identity": …, "parts": {"17": {"rows", "missing", "nbytes"}}}
      part-000017.parquet …     written under another name, synced, then renamed by the worker that made them
      lock                      held by the driver

A journal of format 1 (parts in order, of `encode_file`) is resumed; the other way round it is refused there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anytorch import logs
from anytorch.errors import UsageError
from anytorch.files import replace_file
from anytorch.text.embed.files_journal import Identity, RunFolder

log = logs.logger(__name__)

FORMAT, IN_ORDER = 2, 1


class ScatteredJournal(RunFolder):
    """`parts`: the finished ones by their number."""

    def __init__(self, target: Path, identity: Identity, *, resume: bool) -> None:
        super().__init__(target, identity, resume=resume)
        self.parts: dict[int, dict[str, int]] = {}

    @property
    def rows(self) -> int:
        return sum(part["rows"] for part in self.parts.values())

    @property
    def missing(self) -> int:
        return sum(part["missing"] for part in self.parts.values())

    def _open(self) -> None:
        stored = self._stored() if self._resume else None
        if stored is not None:
            self._check_same(stored["identity"])
            for number, part in stored["parts"].items():
                if self._is_whole(number, part["nbytes"]):
                    self.parts[number] = part
                else:
                    log.warning("%s is damaged; it is computed again", self.part(number))
        self._keep_only(self.parts)
        self._write()

    def _stored(self) -> dict[str, Any] | None:
        try:
            stored: dict[str, Any] = json.loads(self.path.read_bytes())
            parts = stored["parts"]
            if stored["format"] == IN_ORDER:
                parts = dict(enumerate(parts))
            elif stored["format"] != FORMAT:
                raise ValueError("of another format")
            return {"identity": stored["identity"], "parts": {int(number): part for number, part in parts.items()}}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise UsageError(f"{self.path}: is invalid: {exc}", hint="resume=False starts over") from exc

    def add(self, number: int, rows: int, missing: int, nbytes: int) -> None:
        self.parts[number] = {"rows": rows, "missing": missing, "nbytes": nbytes}
        self._write()

    def _write(self) -> None:
        parts = {str(number): part for number, part in sorted(self.parts.items())}
        body = {"format": FORMAT, "identity": self.identity, "parts": parts}
        replace_file(self.path, json.dumps(body, indent=1).encode())
