"""What the workers of one service share: a file that says which models they have, since clients have loaded others.

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
    """The models of one job, and which of them is meant where a request names none ("": there is none)."""

    job: str
    models: tuple[Load, ...] = ()
    default: str = ""

    def after(self, load: Load) -> Lineup:
        """With another model: it takes the place of itself with other options, else of the default, and is the default.

        >>> one, two = Load("one", "text", "cpu", None), Load("two", "text", "cpu", None)
        >>> [load.model for load in Lineup("text", (one, two), "one").after(Load("three", "text", "cpu", None)).models]
        ['two', 'three']
        """
        names = {one.model for one in self.models}
        gone = load.model if load.model in names else self.default
        kept = tuple(one for one in self.models if one.model != gone)
        return replace(self, models=(*kept, load), default=load.model)


class Shared:
    """The file: the models of each job for which one was loaded. Whoever wrote it, every worker follows it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "models.json"
        self._lock = folder / "models.lock"
        self._stamp: tuple[int, int, int] | None = None
        self._newest: list[Lineup] = []

    def tell(self, load: Load, first: Lineup) -> None:
        """A model was loaded here. `first`: what every worker of this service has been started with for its job."""
        with self._locked():
            told = {lineup.job: lineup for lineup in self._read()}
            told[load.job] = told.get(load.job, first).after(load)
            replace_file(self._path, json.dumps([asdict(lineup) for lineup in told.values()]).encode())

    def newest(self) -> list[Lineup]:
        """What the workers are to have. Reads the file only when it is another one."""
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
