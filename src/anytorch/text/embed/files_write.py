"""Parquet with a column of vectors: one file per chunk, and at the end one file of all of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from anytorch.errors import OutputError
from anytorch.text.embed.files_read import as_text

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
    if places is None:
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


def assemble(parts: Sequence[Path], target: Path, vector: str, facts: Mapping[str, Any], schema: Any) -> None:
    """One Parquet file of all parts, a row group each, put in the target's place at the end.

    `schema` is that of a file without rows, for when there are no parts. Parts of a JSON file may have inferred other
    types for a column: it gets the one that holds all of them, else it becomes text.
    """
    temporary = (parts[0] if parts else target).parent / f".{target.name}.whole"
    need = sum(path.stat().st_size for path in parts)
    free = shutil.disk_usage(target.parent).free
    if need > free:
        raise OSError(errno.ENOSPC, f"{need >> 20} MiB are needed, {free >> 20} MiB are free")
    whole = common_schema([pq.read_schema(path) for path in parts]) if parts else schema
    whole = whole.with_metadata({**(whole.metadata or {}), METADATA_KEY: json.dumps(dict(facts)).encode()})
    with _writer(target, temporary, whole, vector) as writer:
        for path in parts:
            table = pq.read_table(path, memory_map=True, partitioning=None)
            writer.write_table(conform(table, whole), row_group_size=max(1, len(table)))


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
    try:
        stored = (pq.read_schema(path).metadata or {}).get(METADATA_KEY)
        return None if stored is None else dict(json.loads(stored))
    except (pa.ArrowException, OSError, ValueError):
        return None


@contextmanager
def _writer(path: Path, temporary: Path, schema: Any, vector: str) -> Iterator[Any]:
    """A writer of Parquet whose file is wholly there, on the disk, or not at all under the name `path`."""
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
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def leaves(schema: Any, names: Sequence[str]) -> list[str]:
    """Parquet's own names for the leaves of these columns."""
    if not names:
        return []
    sink = pa.BufferOutputStream()
    some = pa.schema([schema.field(name) for name in names])
    with pq.ParquetWriter(sink, some):
        pass
    found = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return [found.column(place).path for place in range(len(found))]


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk now."""
    if path.is_dir() and os.name == "nt":
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
