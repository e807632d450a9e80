"""The file that tells all workers of a service which models clients have loaded.

A worker that loads a model changes the file under a lock, by the same rule by which it changed its own models; every
worker then brings its own in line with the file. So all end with the same models, whoever loaded what at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from anytorch.files import replace_file


@dataclass(frozen=True)
class Load:
    """One model, and how it is loaded."""

    model: str
    job: str
    device: str
    quantization: str | None


@dataclass(frozen=True)
class Lineup:
    """The models of one job, and the default among them ("": none)."""

    job: str
    models: tuple[Load, ...] = ()
    default: str = ""

    def after(self, load: Load) -> Lineup:
        """The lineup with another model as default; it replaces the same model with other options, else the default.

        >>> one, two = Load("one", "text", "cpu", None), Load("two", "text", "cpu", None)
        >>> [load.model for load in Lineup("text", (one, two), "one").after(Load("three", "text", "cpu", None)).models]
        ['two', 'three']
        """
        names = {one.model for one in self.models}
        gone = load.model if load.model in names else self.default
        kept = tuple(one for one in self.models if one.model != gone)
        return replace(self, models=(*kept, load), default=load.model)


class Shared:
    """The file with the models of each job that clients changed; every worker follows it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "models.json"
        self._lock = folder / "models.lock"
        self._stamp: tuple[int, int, int] | None = None
        self._newest: list[Lineup] = []

    def tell(self, load: Load, first: Lineup) -> None:
        """Record a model loaded here. `first`: the models every worker was started with for its job."""
        with self._locked():
            told = {lineup.job: lineup for lineup in self._read()}
            told[load.job] = told.get(load.job, first).after(load)
            replace_file(self._path, json.dumps([asdict(lineup) for lineup in told.values()]).encode())

    def newest(self) -> list[Lineup]:
        """The models the workers should have. Reads the file only when it has changed."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return []
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if stamp != self._stamp:
            self._newest = self._read()
            self._stamp = stamp
        return self._newest

    def _read(self) -> list[Lineup]:
        try:
            entries = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        return [Lineup(one["job"], tuple(Load(**load) for load in one["models"]), one["default"]) for one in entries]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # POSIX alone has it, and so has --workers

        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
