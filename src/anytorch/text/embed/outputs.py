"""Write the vectors of a stream of texts to a NumPy file or JSON Lines, with bounded memory and atomically.

(Parquet files, which keep all columns and go on after an interruption, are `files`.)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from anytorch import files
from anytorch.errors import OutputError, UsageError
from anytorch.text.embed.bar import Progress
from anytorch.text.embed.engine import ArrowEngine

ENDINGS = (".npy", ".jsonl")
REPORT_EVERY = 64  # texts between two reports of progress


def write_vectors(
    engine: ArrowEngine,
    texts: Iterable[str],
    target: Path,
    *,
    total: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> int:
    """Write one vector per text to a .npy file ([texts, dim]) or a .jsonl file ({"text", "embedding"}); how many.

    `options` are those of `encode_iter`. Raises OutputError when the disk does not take it; the target is then as before.
    """
    if target.suffix.lower() not in ENDINGS:
        raise UsageError(f"{target}: the name must end in {' or '.join(ENDINGS)}")
    columns, dtype = engine.check_request(options.get("dim"), options.get("precision", "float32"), "numpy")
    rows = _reported(_paired(engine, texts, options), total, progress)
    with replacing(target) as file:
        if target.suffix.lower() == ".npy":
            return _numpy(file, rows, columns, dtype)
        return _json_lines(file, rows)


def _paired(engine: ArrowEngine, texts: Iterable[str], options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each text with its vector. The engine reads ahead, by a bounded number of texts: those wait here."""
    waiting: deque[str] = deque()

    def remembered() -> Iterator[str]:
        for text in texts:
            waiting.append(text)
            yield text

    for vector in engine.encode_iter(remembered(), **options):
        yield waiting.popleft(), vector


def _reported(
    rows: Iterator[tuple[str, Any]], total: int | None, progress: Progress | None
) -> Iterator[tuple[str, Any]]:
    count = 0
    for count, row in enumerate(rows, 1):
        yield row
        if progress is not None and count % REPORT_EVERY == 0:
            progress(count, total)
    if progress is not None:
        progress(count, total)


def _numpy(file: IO[bytes], rows: Iterator[tuple[str, npt.NDArray[Any]]], columns: int, dtype: str) -> int:
    def header(count: int) -> None:
        # NumPy leaves room in the header for the first dimension to grow, so that it can be written again at the end.
        described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, {**described, "shape": (count, columns)})

    header(0)
    begin = file.tell()
    count = 0
    for _, vector in rows:
        file.write(vector.tobytes())
        count += 1
    file.seek(0)
    header(count)
    assert file.tell() == begin, "the header has grown into the data"
    return count


def _json_lines(file: IO[bytes], rows: Iterator[tuple[str, npt.NDArray[Any]]]) -> int:
    count = 0
    for text, vector in rows:
        line = json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False)
        file.write(line.encode() + b"\n")
        count += 1
    return count


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
