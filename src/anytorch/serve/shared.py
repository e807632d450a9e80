"""What the workers of one service share: a file that says which models clients have loaded since it was started."""

from __future__ import annotations

import json
import os
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
    """The file's newest entry per job counts. `news` gives what others have told since the last time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "models.json"
        self._lock = folder / "models.lock"
        self._seen = 0  # serial number of the newest entry that is known here
        self._stamp: int | None = None

    def tell(self, load: Load) -> None:
        with self._locked():
            entries = self._read()
            serial = 1 + max((entry["serial"] for entry in entries), default=0)
            entries = [entry for entry in entries if entry["job"] != load.job]
            entries.append({**asdict(load), "serial": serial, "by": os.getpid()})
            replace_file(self._path, json.dumps(entries).encode())

    def news(self) -> list[Load]:
        try:
            stamp = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if stamp == self._stamp:
            return []
        self._stamp = stamp
        entries = sorted(self._read(), key=lambda entry: int(entry["serial"]))
        fresh = [entry for entry in entries if entry["serial"] > self._seen and entry["by"] != os.getpid()]
        self._seen = max((entry["serial"] for entry in entries), default=0)
        return [Load(e["model"], e["job"], e["device"], e["quantization"]) for e in fresh]

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
