"""Encode a file of texts into a Parquet file with their vectors: streamed, in parts, and resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from anytorch import limits, logs
from anytorch.counts import counted
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import InputError, OutOfMemory, UsageError
from anytorch.text.embed.bar import Progress, shown
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.files_journal import (
    Identity,
    Journal,
    differences,
    engine_identity,
    file_identity,
    finished_rows,
    remove_leftovers,
)
from anytorch.text.embed.files_read import Chunk, Source
from anytorch.text.embed.files_write import VECTOR, assemble, disk_errors, read_facts, with_vectors, write_part
from anytorch.values import dataclass
from anytorch.workers import Workers

log = logs.logger(__name__)

# Rows that are read at once, and the most of one part.
CPU_ROWS, DEVICE_ROWS = 4096, 32768
# A part is written about every so many seconds: what is computed again after a crash. A CPU may take minutes for CPU_ROWS.
SAVE_S = 10.0
FIRST_ROWS, LEAST_ROWS = 128, 16


@dataclass(frozen=True)
class FileReport:
    """What `encode_file` did. `resumed` rows had been finished by an earlier run; `missing` rows have no vector."""

    target: Path
    rows: int
    resumed: int
    missing: int
    truncated: int  # texts of this run that were longer than the model's max_length
    seconds: float


def encode_file(
    source: str | Path,
    target: str | Path,
    *,
    column: str | None = None,
    engine: ArrowEngine | None = None,
    resume: bool = True,
    chunk_rows: int | None = None,
    progress: Progress | bool | None = None,
    prompt: str | None = None,
    dim: int | None = None,
    precision: str = "float32",
    vector_column: str = VECTOR,
    missing: Literal["error", "null"] = "error",
    format: str | None = None,
    overwrite: bool = False,
) -> FileReport:
    """Encode a column of texts of a Parquet, CSV, TSV, JSON Lines or text file and write a Parquet file with the vectors.

    All columns of the source are kept (those of a CSV as text); the vectors are one more, `vector_column`, of type
    fixed_size_list. `column` may be left out when there is only one that can be meant. `missing="null"`: rows without a
    text get no vector instead of being an error.

    The source is read `chunk_rows` at a time, and finished rows are saved as often, on a CPU about every ten seconds if
    `chunk_rows` is left out; nothing has the target's name before all is there. What is finished when a run is
    interrupted, killed or out of disk stays beside the target, and the next run with the same source, model and settings
    goes on from there; with others it is refused (UsageError says what differs) unless `resume=False`. A target that is
    complete already is left as it is.

    Raises InputError for a row that cannot be used (it names row and column), OutputError when the disk is full, and
    OutOfMemory, once the engine has no smaller batch to try.

    >>> from pathlib import Path
    >>> _ = Path("texts.txt").write_text("Hello\\nworld\\n")
    >>> encode_file("texts.txt", "texts.parquet").rows
    2
    """
    began = time.monotonic()
    source, target = Path(source), Path(target)
    rows = open_source(source, target, column, vector_column=vector_column, missing=missing, format=format)
    with ExitStack() as stack:
        if engine is None:
            engine = stack.enter_context(ArrowEngine())
        # A device needs seconds for a chunk, and its vectors' last bits may depend on what is computed beside them.
        by_time = chunk_rows is None and engine.on_cpu
        if chunk_rows is None:
            chunk_rows = CPU_ROWS if engine.on_cpu else DEVICE_ROWS
        else:
            chunk_rows = limits.ROWS.check("chunk_rows", chunk_rows)
        engine.check_request(dim, precision, "numpy")
        identity = run_identity(
            rows,
            asked_identity(engine, prompt),
            dim=dim,
            precision=precision,
            vector_column=vector_column,
            missing=missing,
            chunk_rows=chunk_rows,
        )
        if (done := finished(target, identity, resume=resume, overwrite=overwrite)) is not None:
            return FileReport(target, done["rows"], done["rows"], done["missing"], 0, time.monotonic() - began)
        report = stack.enter_context(shown(progress, source.name))
        kept = finished_rows(target) if resume else 0
        before = f"{counted(kept, 'row is', 'rows are')} finished and kept" if kept else "nothing has been computed yet"
        with disk_errors(f"writing beside {target}", before):
            journal = stack.enter_context(Journal(target, identity, resume=resume))
        truncated_before = engine.stats.truncated
        run = _Run(engine, rows, journal, vector_column, {"prompt": prompt, "dim": dim, "precision": precision})
        with memory_errors(journal):
            run.encode_rest(chunk_rows, report, Pieces(SAVE_S if by_time else None))
            run.complete()
        truncated = engine.stats.truncated - truncated_before
        return FileReport(target, journal.rows, run.resumed, run.missing, truncated, round(time.monotonic() - began, 3))


def open_source(
    source: Path, target: Path, column: str | None, *, vector_column: str, missing: str, format: str | None = None
) -> Source:
    """The source of a run whose vectors can be written to `target`. Raises UsageError if they cannot."""
    if missing not in ("error", "null"):
        raise UsageError(f"missing={missing!r}: use 'error' or 'null'")
    if target.is_dir() or target.suffix.lower() not in (".parquet", ".pq"):
        raise UsageError(f"{target}: the target must be a Parquet file", hint=f"such as {source.stem}-vectors.parquet")
    rows = Source(source, column, format=format, allow_missing=missing == "null")
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} is both source and target")
    if vector_column in rows.columns:
        raise UsageError(f"{source.name} already has a column {vector_column!r}", hint="name another: vector_column=…")
    return rows


def asked_identity(engine: ArrowEngine, prompt: str | None) -> Identity:
    """The part of a run's identity that only a loaded engine knows: plain data, which Ray's workers send."""
    return {"engine": engine_identity(engine), "prompt": engine.prompt_text(prompt)}


def run_identity(rows: Source, asked: Identity, **options: Any) -> Identity:
    """Everything the vectors of a run depend on, from the source, `asked_identity` and the run's own options."""
    try:
        identity = file_identity(rows.path)
    except OSError as exc:
        raise InputError(f"{rows.path}: cannot be read: {exc.strerror or exc}") from exc
    source = {**identity, "format": rows.format, "column": rows.column}
    return {"source": source, **asked, **options}


def finished(target: Path, identity: Identity, *, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """The facts of a target that is complete already; None if it has to be made. Raises UsageError if it is another."""
    if not target.exists():
        return None
    done = read_facts(target)
    changed = [] if done is None else differences(done.get("identity", {}), identity)
    if resume and done is not None and not changed:
        remove_leftovers(target)
        return done
    if not overwrite:
        told = "" if done is None else f", made from something else: {'; '.join(changed)}"
        raise UsageError(f"{target} exists{told}", hint="overwrite=True, or name another target")
    return None


@contextmanager
def memory_errors(journal: Journal) -> Iterator[None]:
    """Memory that ran out as our error, with what is kept."""
    try:
        yield
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        why = (str(exc).splitlines() or [type(exc).__name__])[0]
        kept = f"{counted(journal.rows, 'row is', 'rows are')} finished and kept"
        raise OutOfMemory(
            f"writing {journal.target}: out of memory ({why}); {kept}",
            hint="close other programs and run it again: it resumes",
        ) from exc


class _Run:
    """One run over a file, from the first row that is not finished."""

    def __init__(
        self, engine: ArrowEngine, rows: Source, journal: Journal, vector: str, options: dict[str, Any]
    ) -> None:
        self._engine, self._rows, self._journal, self._vector, self._options = engine, rows, journal, vector, options
        self.resumed = journal.rows
        if self.resumed:
            log.info("%s: %s finished; resuming", rows.path, counted(self.resumed, "row is", "rows are"))

    @property
    def missing(self) -> int:
        return sum(part["missing"] for part in self._journal.parts)

    def encode_rest(self, chunk_rows: int, report: Progress | None, pieces: Pieces) -> None:
        """Read the next chunk and write the last one beside encoding this one, so that no device waits for a disk."""
        total = self._rows.total() if report is not None else None
        if report is not None:
            report(self._journal.rows, total)
        writing: Future[None] | None = None
        with Workers(2, thread_name_prefix="anytorch-file") as beside:
            for chunk in one_ahead(self._rows.chunks(chunk_rows, skip=self._journal.rows), beside):
                for piece in pieces.of(chunk):
                    table, missing = self._encoded(piece, report, total)
                    if writing is not None:
                        writing.result()
                    writing = beside.submit(self._keep, table, missing)
            if writing is not None:
                writing.result()

    def _keep(self, table: Any, missing: int) -> None:
        journal = self._journal
        with disk_errors(
            f"writing {journal.target}", f"{counted(journal.rows, 'row is', 'rows are')} finished and kept"
        ):
            write_part(table, journal.part(len(journal.parts)), self._vector)
            journal.add(len(table), missing)

    def _encoded(self, chunk: Chunk, report: Progress | None, total: int | None) -> tuple[Any, int]:
        finished = chunk.first - 1
        places = [place for place, text in enumerate(chunk.texts) if text is not None]
        texts = [text for text in chunk.texts if text is not None]
        told = None if report is None else (lambda done, _: report(finished + done, total))
        vectors = self._engine.encode(texts, progress=told, **self._options)
        return with_vectors(chunk.table, vectors, places, self._vector), len(chunk.texts) - len(places)

    def complete(self) -> None:
        """All parts are there: make them the target."""
        journal = self._journal
        parts = [journal.part(number) for number in range(len(journal.parts))]
        facts = {"identity": journal.identity, "rows": journal.rows, "missing": self.missing}
        empty = None
        if not parts:  # a source without rows
            columns, dtype = self._engine.check_request(self._options["dim"], self._options["precision"], "numpy")
            fields = [(name, pa.string()) for name in self._rows.columns]
            empty = pa.schema([*fields, (self._vector, pa.list_(pa.from_numpy_dtype(np.dtype(dtype)), columns))])
        with disk_errors(
            f"putting {journal.target} together", f"{counted(journal.rows, 'row is', 'rows are')} finished and kept"
        ):
            assemble(parts, journal.target, self._vector, facts, empty, journal.identity["chunk_rows"])
        journal.remove()


class Pieces:
    """Cuts chunks so that each piece takes about `save_s` seconds, by how long the ones before took; None: not at all."""

    def __init__(self, save_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._save_s, self._clock = save_s, clock
        self._rows = FIRST_ROWS

    def of(self, chunk: Chunk) -> Iterator[Chunk]:
        if self._save_s is None:
            yield chunk
            return
        first = 0
        while first < len(chunk.texts):
            texts = chunk.texts[first : first + self._rows]
            began = self._clock()
            yield Chunk(chunk.first + first, texts, chunk.table.slice(first, len(texts)))
            first += len(texts)
            per_row = max((self._clock() - began) / len(texts), 1e-9)
            # At most four times the last piece: of a few short texts the long ones behind them cannot be foretold.
            self._rows = max(LEAST_ROWS, min(4 * len(texts), int(self._save_s / per_row)))


def one_ahead(chunks: Iterator[Chunk], beside: Executor) -> Iterator[Chunk]:
    """The same chunks, each made while the one before it is in use."""
    upcoming = beside.submit(next, chunks, None)
    while (chunk := upcoming.result()) is not None:
        upcoming = beside.submit(next, chunks, None)
        yield chunk
