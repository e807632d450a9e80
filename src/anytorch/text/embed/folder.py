"""A folder that can be searched by meaning: its passages and their vectors in an index that is updated, not rebuilt.

The index is one Parquet file in the cache, for one folder and one model: a row per passage, with the file it is from, that
file's size and time of change, and the vector. An update embeds the files that are new or changed, drops those that are gone
and keeps the rest. It is written whole or not at all, every minute while a long update goes on: an interrupted one is
resumed where the last minute ended.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from anytorch import limits, logs, settings
from anytorch.errors import InputError, OutputError
from anytorch.files import replacing
from anytorch.text.embed.bar import Progress, shown
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.files import asked_identity
from anytorch.text.embed.files_write import METADATA_KEY, disk_errors, read_facts
from anytorch.text.embed.passages import Passage, Skipped, files_in, passages_of
from anytorch.values import dataclass

log = logs.logger(__name__)

SAVE_S = 60.0
AT_ONCE = 512  # passages that are embedded together


@dataclass(frozen=True)
class FolderHit:
    """A passage found: where it is, from line (row, page) `place` on, and how near it is."""

    path: Path
    place: int
    score: float
    text: str


@dataclass(frozen=True)
class FolderUpdate:
    """What an update did: files in the index, of which `added` are new, `changed` embedded again; `removed` were gone."""

    files: int
    passages: int
    added: int
    changed: int
    removed: int
    skipped: tuple[Skipped, ...]
    unsaved: str = ""  # why the index could not be written: the next update does all of this again


class _File:
    """One file in the index. `stamp` tells whether it has changed."""

    def __init__(self, stamp: tuple[int, int], passages: Sequence[Passage], vectors: npt.NDArray[Any] | None) -> None:
        self.stamp, self.passages, self.vectors = stamp, passages, vectors


class FolderIndex:
    """The searchable passages of a folder.

    `update()` brings the index up to date, `search(question)` finds. The engine stays the caller's.

    >>> index = FolderIndex("notes", engine)      # doctest: +SKIP
    >>> index.update().passages                   # doctest: +SKIP
    >>> index.search("where did I put it")[0]     # doctest: +SKIP
    """

    def __init__(
        self, folder: str | Path, engine: ArrowEngine, *, prompt: str = "passage", dim: int | None = None
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        self._engine, self._prompt, self._dim = engine, prompt, dim
        self._identity = {**asked_identity(engine, prompt), "dim": dim}
        self.path = index_path(self.folder, self._identity)
        self._files: dict[str, _File] = {}

    def update(self, progress: Progress | bool | None = None) -> FolderUpdate:
        """Read what is new or changed in the folder, and forget what is gone.

        A file that cannot be read is skipped, with the reason. Where the index cannot be written it serves this object
        alone (`unsaved`). What was embedded before Ctrl-C is kept.
        """
        skipped: list[Skipped] = []
        stored = self._load()
        self._files = {}
        waiting: list[tuple[str, _File]] = []
        added = changed = 0
        for path in files_in(self.folder, skipped):
            name = path.relative_to(self.folder).as_posix()
            try:
                name.encode()
            except UnicodeEncodeError:
                skipped.append(Skipped(path, "its name is not UTF-8"))
                continue
            try:
                facts = path.stat()
                stamp = (facts.st_size, facts.st_mtime_ns)
                if name in stored and stored[name].stamp == stamp:
                    self._files[name] = stored[name]
                    continue
                file = _File(stamp, passages_of(path), None)
            except InputError as exc:
                skipped.append(Skipped(path, exc.message.partition(": ")[2] or exc.message))
                continue
            except OSError as exc:
                skipped.append(Skipped(path, exc.strerror or str(exc)))
                continue
            added, changed = (added, changed + 1) if name in stored else (added + 1, changed)
            waiting.append((name, file))
        removed = len(stored.keys() - self._files.keys() - {name for name, _ in waiting})
        with ExitStack() as stack:
            report = stack.enter_context(shown(progress, self.folder.name))
            try:
                self._embed(waiting, report)
            except KeyboardInterrupt:
                self._keep()
                raise
        unsaved = self._keep() if waiting or removed else ""
        passages = sum(len(file.passages) for file in self._files.values())
        return FolderUpdate(len(self._files), passages, added, changed, removed, tuple(skipped), unsaved)

    def _embed(self, waiting: Sequence[tuple[str, _File]], report: Callable[[int, int | None], None] | None) -> None:
        total, done, saved = sum(len(file.passages) for _, file in waiting), 0, time.monotonic()
        for group in groups(waiting, AT_ONCE):
            texts = [passage.text for _, file in group for passage in file.passages]
            vectors = self._engine.encode(texts, prompt=self._prompt, dim=self._dim)
            first = 0
            for name, file in group:
                file.vectors = vectors[first : first + len(file.passages)]
                first += len(file.passages)
                self._files[name] = file
            done += len(texts)
            if report is not None:
                report(done, total)
            if time.monotonic() - saved > SAVE_S:
                self._keep()
                saved = time.monotonic()

    def search(self, question: str, k: int = 10) -> list[FolderHit]:
        """The k passages nearest in meaning, best first. Call `update` before."""
        k = limits.HITS.check("k", k)
        rows = [(name, file, place) for name, file in self._files.items() for place in range(len(file.passages))]
        if not rows:
            return []
        vectors = np.concatenate([file.vectors for file in self._files.values() if file.vectors is not None])
        asked = self._engine.encode(question, prompt="query", dim=self._dim)
        found = []
        for hit in self._engine.search(asked, vectors, min(k, len(rows))):
            name, file, place = rows[hit.index]
            passage = file.passages[place]
            found.append(FolderHit(self.folder / name, passage.place, hit.score, passage.text))
        return found

    # --- the file ----------------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, _File]:
        """The stored index; {} when there is none, or it cannot be read or is another model's."""
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        facts = read_facts(self.path)
        if facts is None:
            return {}
        try:
            table = pq.read_table(self.path)
            names, sizes, times = (table.column(name).to_pylist() for name in ("file", "size", "mtime_ns"))
            places, texts = table.column("place").to_pylist(), table.column("text").to_pylist()
            column = table.column("embedding").combine_chunks()
            vectors = column.values.to_numpy(zero_copy_only=False).reshape(len(table), -1)
        except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError) as exc:
            log.warning("%s cannot be read and is made again: %s", self.path, exc)
            return {}
        found: dict[str, _File] = {}
        first = 0
        for last in range(1, len(names) + 1):
            if last < len(names) and names[last] == names[first]:
                continue
            passages = [Passage(text, place) for text, place in zip(texts[first:last], places[first:last], strict=True)]
            found[names[first]] = _File((sizes[first], times[first]), passages, vectors[first:last])
            first = last
        # Files without a passage have no row: the facts name them.
        for name, size, changed in facts.get("empty", []):
            found[name] = _File((size, changed), [], None)
        return found

    def write(self, target: Path) -> None:
        """Write the passages, their places and vectors to a Parquet file, which `anytorch embed FILE --search` reads."""
        self._save(target, private=False)

    def _keep(self) -> str:
        """Write the index; why not, if that fails: a full disk or a read-only cache does not prevent an answer."""
        try:
            self._save(self.path, private=True)  # it holds the texts
        except OutputError as exc:
            return exc.message
        return ""

    def _save(self, path: Path, *, private: bool) -> None:
        import pyarrow.parquet as pq

        rows = [(name, file, passage) for name, file in self._files.items() for passage in file.passages]
        parts = [file.vectors for file in self._files.values() if file.vectors is not None and len(file.passages)]
        width = parts[0].shape[1] if parts else 1
        flat = np.concatenate(parts).reshape(-1) if parts else np.zeros(0, np.float32)
        empty = [(name, *file.stamp) for name, file in self._files.items() if not file.passages]
        facts = {"identity": self._identity, "folder": str(self.folder.resolve()), "empty": empty}
        table = pa.table(
            {
                "file": pa.array([name for name, _, _ in rows], pa.string()),
                "size": pa.array([file.stamp[0] for _, file, _ in rows], pa.int64()),
                "mtime_ns": pa.array([file.stamp[1] for _, file, _ in rows], pa.int64()),
                "place": pa.array([passage.place for _, _, passage in rows], pa.int64()),
                "text": pa.array([passage.text for _, _, passage in rows], pa.string()),
                "embedding": pa.FixedSizeListArray.from_arrays(pa.array(flat), width),
            }
        ).replace_schema_metadata({METADATA_KEY: json.dumps(facts).encode()})
        with disk_errors(f"writing {path}", "the file is as it was"), replacing(path, private=private) as file:
            pq.write_table(table, file, compression="zstd")


def groups(files: Sequence[tuple[str, _File]], most: int) -> Iterator[list[tuple[str, _File]]]:
    """Files together, with at most about `most` passages; a larger file is a group of its own."""
    group: list[tuple[str, _File]] = []
    count = 0
    for one in files:
        group.append(one)
        count += len(one[1].passages)
        if count >= most:
            yield group
            group, count = [], 0
    if group:
        yield group


def index_path(folder: Path, identity: Any) -> Path:
    """Where the index of a folder is for a model and its settings."""
    named = json.dumps([str(folder.resolve()), identity], sort_keys=True)
    return settings.cache_folder() / "folders" / f"{hashlib.sha256(named.encode()).hexdigest()[:32]}.parquet"
