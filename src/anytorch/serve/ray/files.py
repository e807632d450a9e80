"""`anytorch embed big.parquet --ray`: a file of texts as a Ray Data job, resumable after anything.

The file is cut into the same chunks as `encode_file` cuts; Ray Data hands their numbers to a pool of workers, one per
device, and each worker reads its chunk, encodes it and writes it as a part beside the target. The driver notes finished
parts in the journal as they come, in any order, and puts the target together at the end. On several machines the source
and the target lie on storage that all of them see.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anytorch import logs
from anytorch.counts import counted
from anytorch.errors import AnytorchError, InputError, UsageError
from anytorch.files import parse_json, replace_file
from anytorch.serve.ray.cluster import Share, cluster, share_of
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.files import (
    CPU_ROWS,
    DEVICE_ROWS,
    FileReport,
    asked_identity,
    finished,
    open_source,
    run_identity,
)
from anytorch.text.embed.files_journal import (
    Identity,
    RunFolder,
    check_parts,
    part_path,
    partial_folder,
    remove_leftovers,
)
from anytorch.text.embed.files_read import Source
from anytorch.text.embed.files_write import VECTOR, assemble, disk_errors, with_vectors, write_part
from anytorch.values import dataclass

log = logs.logger(__name__)

Progress = Callable[[int, "int | None"], None]


@dataclass(frozen=True)
class RayJob:
    """The job as plain data, which is sent to the workers."""

    source: str
    column: str
    folder: str  # of the parts
    chunk_rows: int
    vector_column: str
    missing: str
    engine: dict[str, Any]  # what ArrowEngine is made with
    options: dict[str, Any]  # what encode is asked for


def encode_file_on_ray(
    source: str | Path,
    target: str | Path,
    *,
    column: str | None = None,
    engine: dict[str, Any] | None = None,
    address: str | None = None,
    resume: bool = True,
    overwrite: bool = False,
    chunk_rows: int | None = None,
    progress: Progress | None = None,
    prompt: str | None = None,
    dim: int | None = None,
    precision: str = "float32",
    vector_column: str = VECTOR,
    missing: str = "error",
) -> FileReport:
    """As `encode_file`, on a Ray cluster. `engine`: the arguments of ArrowEngine, by name. The source is Parquet.

    Runs that were interrupted or killed go on where they were, also ones that `encode_file` began with as many rows per
    chunk. Raises what `encode_file` raises.
    """
    began = time.monotonic()
    source, target = Path(source).resolve(), Path(target).resolve()
    rows = open_source(source, target, column, vector_column=vector_column, missing=missing)
    if rows.format != "parquet":
        raise UsageError(
            f"{source.name}: with --ray the source must be Parquet: workers start reading anywhere in it",
            hint="convert it first, or leave --ray out",
        )
    made_with = dict(engine or {})
    options = {"prompt": prompt, "dim": dim, "precision": precision}
    with cluster(address) as ray:
        share = share_of(ray, str(made_with.get("device") or "auto"), whole_nodes=False)
        if share.threads is not None:
            made_with["threads"] = made_with.get("threads") or share.threads
        asked, on_cpu = _looked(ray, share, made_with, options)
        chunk_rows = chunk_rows or (CPU_ROWS if on_cpu else DEVICE_ROWS)
        identity = run_identity(
            rows,
            asked,
            dim=dim,
            precision=precision,
            vector_column=vector_column,
            missing=missing,
            chunk_rows=chunk_rows,
        )
        if (done := finished(target, identity, resume=resume, overwrite=overwrite)) is not None:
            return FileReport(target, done["rows"], done["rows"], done["missing"], 0, time.monotonic() - began)
        job = RayJob(
            str(source),
            rows.column,
            str(partial_folder(target)),
            chunk_rows,
            vector_column,
            missing,
            made_with,
            options,
        )
        with disk_errors(f"writing beside {target}", "nothing has been computed yet"):
            journal = ScatteredJournal(target, identity, resume=resume)
        with journal:
            resumed = journal.rows
            total = rows.total() or 0
            truncated = _encode_rest(ray, job, share, journal, total, progress)
            _assemble(journal, vector_column)
        remove_leftovers(target)
    return FileReport(target, journal.rows, resumed, journal.missing, truncated, round(time.monotonic() - began, 3))


def _looked(ray: Any, share: Share, engine: dict[str, Any], options: dict[str, Any]) -> tuple[Identity, bool]:
    """The properties the vectors depend on, found on the worker that computes them."""
    look = ray.remote(**share.options)(_look)
    found: dict[str, Any] = ray.get(look.remote(engine, options))
    if "error" in found:
        raise InputError(found["error"], hint=found["hint"])
    return found["identity"], found["on_cpu"]


def _look(engine: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    try:
        with ArrowEngine(**engine) as made:
            made.check_request(options["dim"], options["precision"], "numpy")
            return {"identity": asked_identity(made, options["prompt"]), "on_cpu": made.on_cpu}
    except AnytorchError as exc:
        return {"error": exc.message, "hint": exc.hint}


def _encode_rest(
    ray: Any, job: RayJob, share: Share, journal: ScatteredJournal, total: int, progress: Progress | None
) -> int:
    """Have Ray Data go through the chunks that are not finished. Texts that were cut, of this run."""
    count = -(-total // job.chunk_rows)
    left = [number for number in range(count) if number not in journal.parts]
    if progress is not None:
        progress(journal.rows, total)
    truncated = 0
    for row in _results(ray, job, share, left) if left else ():
        if row["error"]:
            raise InputError(row["error"], hint=row["hint"])
        journal.add(int(row["number"]), int(row["rows"]), int(row["missing"]), int(row["nbytes"]))
        truncated += int(row["truncated"])
        if progress is not None:
            progress(journal.rows, total)
    return truncated


def _results(ray: Any, job: RayJob, share: Share, numbers: list[int]) -> Iterator[dict[str, Any]]:
    context = ray.data.DataContext.get_current()
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # after the import, which sets it
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    workers = min(share.count, len(numbers))
    # A block per chunk: a block's results come when all of it is done, and each finished part is to be noted at once.
    chunks = ray.data.from_items([{"number": number} for number in numbers], override_num_blocks=len(numbers))
    done = chunks.map_batches(
        ChunkWorker,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
        **share.options,
    )
    yield from done.iter_rows()


class ChunkWorker:
    """A worker process: one engine that encodes one chunk at a time."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._engine = ArrowEngine(**job.engine)
        self._source = Source(Path(job.source), job.column, allow_missing=job.missing == "null")

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        found = [self._encoded(int(number)) for number in batch["number"]]
        return {name: [row[name] for row in found] for name in found[0]}

    def _encoded(self, number: int) -> dict[str, Any]:
        """Encode a chunk and write it. An error in the texts is returned as data, because a retry would not help."""
        answer: dict[str, Any] = {"number": number, "rows": 0, "missing": 0, "nbytes": 0, "truncated": 0}
        try:
            return {**answer, **self._written(number), "error": "", "hint": ""}
        except AnytorchError as exc:
            return {**answer, "error": exc.message, "hint": exc.hint}

    def _written(self, number: int) -> dict[str, int]:
        job = self._job
        chunk = next(self._source.chunks(job.chunk_rows, skip=number * job.chunk_rows))
        places = [place for place, text in enumerate(chunk.texts) if text is not None]
        before = self._engine.stats.truncated
        vectors = self._engine.encode([text for text in chunk.texts if text is not None], **job.options)
        whole = len(places) == len(chunk.texts)
        table = with_vectors(chunk.table, vectors, None if whole else places, job.vector_column)
        path = part_path(Path(job.folder), number)
        with disk_errors(f"writing {path}", "the chunks before it are finished and kept"):
            write_part(table, path, job.vector_column)
        return {
            "rows": len(table),
            "missing": len(table) - len(places),
            "nbytes": path.stat().st_size,
            "truncated": self._engine.stats.truncated - before,
        }


def _assemble(journal: ScatteredJournal, vector: str) -> None:
    parts = [part_path(journal.folder, number) for number in sorted(journal.parts)]
    if not parts:
        raise InputError(f"{journal.target.name}: the source has no rows", hint="leave --ray out for an empty file")
    facts = {"identity": journal.identity, "rows": journal.rows, "missing": journal.missing}
    with disk_errors(
        f"putting {journal.target} together", f"{counted(journal.rows, 'row is', 'rows are')} finished and kept"
    ):
        assemble(parts, journal.target, vector, facts, None)


# --- which parts are finished when they come in any order -------------------------------------------------------------

# The folder is that of `text.embed.files_journal`.
#
#     .<target>.partial/
#       journal.json              {"format": 2, "identity": …, "parts": {"17": {"rows", "missing", "nbytes"}}}
#       part-000017.parquet …     written under another name, synced, then renamed by the worker that made them
#       lock                      held by the driver
#
# A journal of format 1 (parts in order, of `encode_file`) is resumed; the other way round it is refused there.

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
            stored: dict[str, Any] = parse_json(self.path.read_bytes())
            parts = stored["parts"]
            if stored["format"] == IN_ORDER:
                parts = dict(enumerate(parts))
            elif stored["format"] != FORMAT:
                raise ValueError("of another format")
            check_parts(stored["identity"], parts.values())
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
