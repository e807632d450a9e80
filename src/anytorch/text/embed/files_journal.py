"""The journal that makes a run over a file resumable: its identity and its finished parts.

    .<target>.partial/
      journal.json              format, identity, finished parts; replaced whole
      part-000000.parquet …     one per chunk, each written under another name, synced, then renamed
      lock                      held by the run that works here; the system frees it when that run dies

A part counts once the journal names it, with its rows and its size in bytes: a run that was killed between the two
computes that part again. The identity is everything the vectors depend on; a run with another one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from anytorch import logs
from anytorch._version import __version__
from anytorch.errors import UsageError
from anytorch.files import parse_json, replace_file, sync_folder

if TYPE_CHECKING:
    from typing_extensions import Self

log = logs.logger(__name__)

FORMAT = 1
SAMPLE_NBYTES = 1 << 20
SAMPLES = 16
WHOLE_NBYTES = 64 << 20  # files up to this size are hashed whole
SMALL_FILES = (".json", ".txt", ".model")
COUNTS = ("rows", "missing", "nbytes")  # of a part
Identity = dict[str, Any]


def file_identity(path: Path) -> Identity:
    """Size, time of change, and a hash: of the whole file, or of 16 samples of a mebibyte spread over a large one."""
    facts = path.stat()
    return {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "hash": content_hash(path, facts.st_size)}


def content_hash(path: Path, size: int) -> str:
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_NBYTES:
            while block := file.read(SAMPLE_NBYTES):
                digest.update(block)
        else:
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_NBYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_NBYTES))
    return digest.hexdigest()[:32]


def model_identity(folder: Path) -> str:
    """A hash over the model's files: settings and vocabulary whole, weights as `content_hash` has it. Not its path."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and path.suffix in (*SMALL_FILES, ".safetensors"):
            digest.update(f"{path.relative_to(folder).as_posix()} {content_hash(path, path.stat().st_size)}\n".encode())
    return digest.hexdigest()[:32]


def engine_identity(engine: Any) -> Identity:
    """The settings besides the model that a vector's bits depend on."""
    about = engine.describe()
    encoder = about.get("encoder", {})
    kinds = {name.partition(":")[0].strip() for name in str(about.get("device", "")).split(",")}
    return {
        "anytorch": __version__,
        "model": model_identity(Path(engine.recipe.folder)),
        "pooling": about.get("pooling"),
        "steps": about.get("steps"),
        "max_length": about.get("max_length"),
        "device": ", ".join(sorted(kinds)),
        "kernels": encoder.get("kernels"),
        "dtype": encoder.get("dtype"),
        "quantization": about.get("quantization"),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The differences between two identities, in words. Pure.

    >>> differences({"source": {"size": 1}, "dim": 4}, {"source": {"size": 2}, "dim": 4})
    ['source size was 1 and is 2']
    """
    found = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{key} ")
        elif old != new:
            found.append(f"{prefix}{key} was {old!r} and is {new!r}")
    return found


def part_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


class RunFolder:
    """The folder of one run, and whose run it is. A context manager: it holds the lock."""

    def __init__(self, target: Path, identity: Identity, *, resume: bool) -> None:
        self.target, self.identity = target, identity
        self.folder = partial_folder(target)
        self._resume = resume
        self._lock: IO[bytes] | None = None

    @property
    def path(self) -> Path:
        return self.folder / "journal.json"

    def part(self, number: int) -> Path:
        return part_path(self.folder, number)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_folder(self.folder.parent)  # else a power loss may take the folder, with every part that is synced in it
        self._lock = (self.folder / "lock").open("wb")
        try:
            hold_lock(self._lock, self.target)
            self._open()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lock is not None
        self._lock.close()

    def _open(self) -> None:
        """Find what an earlier run has finished; called with the lock held."""
        raise NotImplementedError

    def _check_same(self, before: Mapping[str, Any]) -> None:
        changed = differences(before, self.identity)
        if changed:
            raise UsageError(
                f"{self.target} has an unfinished run that cannot be resumed: {'; '.join(changed)}",
                hint="resume=False (on the command line --no-resume) starts over and discards the finished part",
            )

    def _is_whole(self, number: int, nbytes: int) -> bool:
        return self.part(number).is_file() and self.part(number).stat().st_size == nbytes

    def _keep_only(self, numbers: Iterable[int]) -> None:
        kept = {self.part(number).name for number in numbers} | {"lock", "journal.json"}
        for path in self.folder.iterdir():
            if path.name not in kept:
                path.unlink()


class Journal(RunFolder):
    """Parts that are finished one after the other."""

    def __init__(self, target: Path, identity: Identity, *, resume: bool) -> None:
        super().__init__(target, identity, resume=resume)
        self.parts: list[dict[str, Any]] = []

    @property
    def rows(self) -> int:
        """Rows in finished parts."""
        return sum(part["rows"] for part in self.parts)

    def _open(self) -> None:
        stored = self._stored() if self._resume else None
        if stored is not None:
            self._check_same(stored["identity"])
            for number, part in enumerate(stored["parts"]):
                if not self._is_whole(number, part["nbytes"]):
                    log.warning("%s is damaged; resuming before it", self.part(number))
                    break
                self.parts.append(part)
        self._keep_only(range(len(self.parts)))
        self._write()

    def _stored(self) -> dict[str, Any] | None:
        try:
            stored: dict[str, Any] = parse_json(self.path.read_bytes())
            if stored["format"] != FORMAT or not isinstance(stored["parts"], list):
                raise ValueError("of another format")
            check_parts(stored["identity"], stored["parts"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as exc:
            raise UsageError(f"{self.path}: is invalid: {exc}", hint="resume=False starts over") from exc
        return stored

    def add(self, rows: int, missing: int) -> None:
        """Record the next part as finished."""
        nbytes = self.part(len(self.parts)).stat().st_size
        self.parts.append({"rows": rows, "missing": missing, "nbytes": nbytes})
        self._write()

    def _write(self) -> None:
        body = {"format": FORMAT, "identity": self.identity, "parts": self.parts}
        replace_file(self.path, json.dumps(body, indent=1).encode())

    def remove(self) -> None:
        """Remove the folder once the target is complete. What cannot be removed now goes with the next run."""
        assert self._lock is not None
        self._lock.close()
        try:
            shutil.rmtree(self.folder)
        except OSError as exc:
            log.warning("%s is complete; its parts in %s cannot be removed: %s", self.target, self.folder, exc.strerror)


def check_parts(identity: Any, parts: Iterable[Any]) -> None:
    """Raise ValueError for what a journal cannot hold: entries without numbers of rows and bytes from 0 on."""
    if not isinstance(identity, dict):
        raise ValueError("it does not identify its run")
    for part in parts:
        counts = [part.get(name) for name in COUNTS] if isinstance(part, dict) else [None]
        if not all(type(count) is int and 0 <= count < 2**63 for count in counts):
            raise ValueError(f"a part of it is {str(part)[:60]}")


def remove_leftovers(target: Path) -> None:
    """Remove the parts left by a run that was killed after its target was complete."""
    shutil.rmtree(partial_folder(target), ignore_errors=True)


def finished_rows(target: Path) -> int:
    """How many rows an unfinished run towards this target has kept; 0 when there is none that can be read."""
    try:
        stored = parse_json((partial_folder(target) / "journal.json").read_bytes())
        check_parts({}, stored["parts"])
        return sum(part["rows"] for part in stored["parts"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def partial_folder(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def hold_lock(file: IO[bytes], target: Path) -> None:
    try:
        if os.name == "nt":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        raise UsageError(f"another run is writing {target}", hint="wait for it, or name another target") from exc
