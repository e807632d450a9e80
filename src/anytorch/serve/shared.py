"""What the workers of one service share: a file that says which models clients have loaded since it was started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anytorch.files import replace_file


@dataclass(frozen=True)
class Load:
    """One successful POST /api/load-model."""

    model: str
    job: str
    device: str
    quantization: str | None


class Shared:
    """The file's newest entry per job is what every worker has or is about to have, whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "models.json"
        self._lock = folder / "models.lock"
        self._stamp: tuple[int, int, int] | None = None
        self._newest: list[Load] = []

    def tell(self, load: Load) -> None:
        with self._locked():
            entries = [entry for entry in self._read() if entry["job"] != load.job]
            replace_file(self._path, json.dumps([*entries, asdict(load)]).encode())

    def newest(self) -> list[Load]:
        """The last load of each job that any worker has told of. Reads the file only when it is another one."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return []
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if stamp != self._stamp:
            self._newest = [Load(**entry) for entry in self._read()]
            self._stamp = stamp
        return self._newest

    def _read(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # POSIX alone has it, and so has --workers

        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
