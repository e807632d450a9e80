"""Write vectors: to Parquet with a column of them, one file per chunk and at the end one file of all; to .npy and .jsonl.

Memory is bounded, and a file is there whole or not at all. Parquet and .jsonl keep all columns of the source; only Parquet
can be resumed after an interruption.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from anytorch import files
from anytorch.errors import OutputError, UsageError
from anytorch.files import parse_json
from anytorch.text.embed.bar import Progress
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.files_read import Chunk, as_text

ENDINGS = (".npy", ".jsonl")
VECTOR = "embedding"  # the column
REPORT_EVERY = 64  # texts between two reports of progress
METADATA_KEY = b"anytorch.embed"


@contextmanager
def disk_errors(doing: str, kept: str) -> Iterator[None]:
    """An error of the disk as ours, with what is kept: `with disk_errors("writing part 3", "12,288 rows are kept")`."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            why, hint = "the disk is full", "free some space and run it again: it resumes"
        else:
            why, hint = exc.strerror or str(exc), "run it again when this is fixed: it resumes"
        raise OutputError(f"{doing}: {why}; {kept}", hint=hint) from exc


def with_vectors(table: Any, vectors: npt.NDArray[Any], places: Sequence[int] | None, name: str) -> Any:
    """The table and one more column, fixed_size_list. `places`: the rows that have a vector, None for all of them."""
    width = vectors.shape[1]
    if places is None or len(places) == len(table):
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), width)
    else:
        whole = np.zeros((len(table), width), vectors.dtype)
        missing = np.ones(len(table), bool)
        whole[list(places)], missing[list(places)] = vectors, False
        column = pa.FixedSizeListArray.from_arrays(pa.array(whole.reshape(-1)), width, mask=pa.array(missing))
    return table.append_column(name, column)


def write_part(table: Any, path: Path, vector: str) -> None:
    with _writer(path, path.with_suffix(".writing"), table.schema, vector) as writer:
        writer.write_table(table, row_group_size=max(1, len(table)))


def assemble(
    parts: Sequence[Path],
    target: Path,
    vector: str,
    facts: Mapping[str, Any],
    schema: Any,
    group_rows: int | None = None,
) -> None:
    """One Parquet file of all parts, put in the target's place at the end.

    `group_rows`: of a row group, wherever the parts end; None: each part is one. `schema` is that of a file without rows,
    for when there are no parts. Parts of a JSON file may have inferred other types for a column: it gets the one that holds
    all of them, else it becomes text.
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # 30 ms, which only Parquet pays

    temporary = (parts[0] if parts else target).parent / f".{target.name}.whole"
    need = sum(path.stat().st_size for path in parts)
    free = shutil.disk_usage(target.parent).free
    if need > free:
        raise OSError(errno.ENOSPC, f"{need >> 20} MiB are needed, {free >> 20} MiB are free")
    whole = common_schema([pq.read_schema(path) for path in parts]) if parts else schema
    whole = whole.with_metadata({**(whole.metadata or {}), METADATA_KEY: json.dumps(dict(facts)).encode()})
    with _writer(target, temporary, whole, vector) as writer:
        held = None
        for path in parts:
            table = conform(pq.read_table(path, memory_map=True, partitioning=None), whole)
            held = table if held is None else pa.concat_tables([held, table])
            while held is not None and len(held) >= (group_rows or len(held)):
                size = max(1, group_rows or len(held))
                writer.write_table(held.slice(0, size), row_group_size=size)
                held = held.slice(size) if len(held) > size else None
        if held is not None:
            writer.write_table(held, row_group_size=max(1, len(held)))


def common_schema(schemas: Sequence[Any]) -> Any:
    """Columns in the order they first appear, the vectors last, each with a type that holds all of its parts'. Pure."""
    vector = schemas[0].field(len(schemas[0]) - 1)
    kinds: dict[str, Any] = {}
    for schema in schemas:
        for field in schema:
            if field.name == vector.name or kinds.get(field.name) == field.type:
                continue
            known = kinds.get(field.name, pa.null())
            try:
                both = [pa.schema([(field.name, kind)]) for kind in (known, field.type)]
                kinds[field.name] = pa.unify_schemas(both, promote_options="permissive").field(0).type
            except (pa.ArrowTypeError, pa.ArrowInvalid):
                kinds[field.name] = pa.string()
    fields = [pa.field(name, kind) for name, kind in kinds.items()]
    return pa.schema([*fields, vector], metadata=schemas[0].metadata)


def conform(table: Any, schema: Any) -> Any:
    """The table with exactly the columns and types of the schema."""
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            columns.append(pa.nulls(len(table), field.type))
            continue
        column = table.column(field.name)
        if column.type != field.type:
            if pa.types.is_string(field.type):
                column = pa.array([as_text(value) for value in column.to_pylist()], pa.string())
            else:
                column = column.cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def read_facts(path: Path) -> dict[str, Any] | None:
    """What a finished target says about its own making; None for any other file."""
    import pyarrow.parquet as pq

    try:
        stored = (pq.read_schema(path).metadata or {}).get(METADATA_KEY)
        return None if stored is None else dict(parse_json(stored))
    except (pa.ArrowException, OSError, ValueError, TypeError):
        return None


@contextmanager
def _writer(path: Path, temporary: Path, schema: Any, vector: str) -> Iterator[Any]:
    """A writer of Parquet whose file is wholly there, on the disk, or not at all under the name `path`."""
    import pyarrow.parquet as pq

    names = leaves(schema, [name for name in schema.names if name != vector])
    try:
        with pq.ParquetWriter(
            temporary,
            schema,
            # Text shrinks to a third; the bits of vectors do not, and trying costs as much as encoding them on a GPU.
            compression={f"{vector}.list.element": "none", **dict.fromkeys(names, "zstd")},
            use_dictionary=names,
            write_statistics=names,
        ) as writer:
            yield writer
        sync(temporary)
        os.replace(temporary, path)  # noqa: PTH105
        files.sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def leaves(schema: Any, names: Sequence[str]) -> list[str]:
    """Parquet's own names for the leaves of these columns."""
    import pyarrow.parquet as pq

    if not names:
        return []
    sink = pa.BufferOutputStream()
    some = pa.schema([schema.field(name) for name in names])
    with pq.ParquetWriter(sink, some):
        pass
    found = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [found.column(place).path for place in range(len(found))]


def sync(path: Path) -> None:
    """Have the system write a file to the disk now."""
    handle = os.open(path, os.O_RDWR)  # Windows syncs only what is open for writing
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- .npy and .jsonl ----------------------------------------------------------------------------------------------------


def write_vectors(
    engine: ArrowEngine,
    chunks: Iterable[Chunk],
    target: Path,
    *,
    total: int | None = None,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
    **options: Any,
) -> int:
    """Write one vector per row to a .npy file ([rows, dim]) or, with all columns, to a .jsonl file; how many.

    `options` are those of `encode_iter`. `facts` (where the texts are, and which model) go to a file beside a .npy, so that
    it can be searched. Raises OutputError when the disk does not take it; the target is then as before.
    """
    if target.suffix.lower() not in ENDINGS:
        raise UsageError(f"{target}: the name must end in {' or '.join(ENDINGS)}")
    columns, dtype = engine.check_request(options.get("dim"), options.get("precision", "float32"), "numpy")
    as_numpy = target.suffix.lower() == ".npy"
    count = 0

    def write_header(file: IO[bytes]) -> int:
        # NumPy leaves room in the header for the first dimension to grow, so that it can be written again at the end.
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, {**described, "shape": (count, columns)})
        return file.tell()

    with replacing(target) as file:
        begin = write_header(file) if as_numpy else 0
        for count, (row, vector) in enumerate(_paired(engine, chunks, options, whole=not as_numpy), 1):
            if as_numpy:
                file.write(vector.tobytes())
            else:
                line = json.dumps({**row, VECTOR: vector.tolist()}, ensure_ascii=False, default=str)
                file.write(line.encode() + b"\n")
            if progress is not None and count % REPORT_EVERY == 0:
                progress(count, total)
        if as_numpy:
            end = write_header(file)
            assert end == begin, "the header has grown into the data"
        if progress is not None:
            progress(count, total)
    if as_numpy and facts is not None:
        with replacing(facts_path(target)) as file:
            file.write(json.dumps({"format": 1, "rows": count, **facts}, indent=1).encode() + b"\n")
    return count


def facts_path(target: Path) -> Path:
    """The file beside a .npy that says where its texts are and how its vectors were made."""
    return target.with_name(f"{target.name}.json")


def _paired(
    engine: ArrowEngine, chunks: Iterable[Chunk], options: dict[str, Any], *, whole: bool
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each row ({} unless `whole`) with its vector. The engine reads ahead by a bounded number of texts."""
    waiting: deque[dict[str, Any]] = deque()

    def texts() -> Iterator[str]:
        for chunk in chunks:
            rows = chunk.table.to_pylist() if whole else [{}] * len(chunk.texts)
            for row, text in zip(rows, chunk.texts, strict=True):
                if text is not None:
                    waiting.append(row)
                    yield text

    for vector in engine.encode_iter(texts(), **options):
        yield waiting.popleft(), vector


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """As `files.replacing`, in a folder that must be there, and with errors of the disk as ours."""
    try:
        target.parent.stat()
        with files.replacing(target) as file:
            yield file
    except OSError as exc:
        raise OutputError(
            f"cannot write {target}: {exc.strerror or exc}",
            hint="nothing was changed; free some space, or name another file",
        ) from exc
