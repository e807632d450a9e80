"""Texts' tokens into batches, and vectors into their rows: compiled where there is a compiler, else by NumPy.

NumPy computes an index for every token and holds the GIL; copying texts and rows as they lie takes a tenth of the time,
and whoever sends the next batch to a GPU does not wait for it.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anytorch import logs, native
from anytorch.errors import NativeUnavailable

if TYPE_CHECKING:
    import numpy.typing as npt

log = logs.logger(__name__)

SOURCE = Path(__file__).with_name("moves.cpp")


def gather_texts(
    ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], places: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The ids of the texts at `places`, one after the other, and where each starts. Raises IndexError for no such text."""
    _check(places, len(starts) - 1, "texts")
    library = _library()
    if library is None or not (_plain(ids, np.int32) and _plain(starts, np.int32) and _plain(places, np.int64)):
        return gather_by_index(ids, starts, places)
    first, last = starts[places], starts[places + 1]
    if len(places) and (int(first.min()) < 0 or int(last.max()) > len(ids) or bool((last < first).any())):
        raise IndexError(f"texts that start or end outside of the {len(ids)} ids there are")
    total = int((last - first).sum())
    out, begins = np.empty(total, np.int32), np.empty(len(places) + 1, np.int32)
    library.moves_gather(
        ids.ctypes.data, starts.ctypes.data, places.ctypes.data, len(places), out.ctypes.data, begins.ctypes.data
    )
    return out, begins


def gather_by_index(
    ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], places: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The same by NumPy: for callers that do much more than cut batches, while nothing is compiled yet."""
    lengths = starts[places + 1] - starts[places]
    begins = np.zeros(len(places) + 1, np.int32)
    np.cumsum(lengths, out=begins[1:])
    # For each token of the result: its place within its text plus where that text begins.
    index = np.arange(int(begins[-1]), dtype=np.int32) + np.repeat(starts[places] - begins[:-1], lengths)
    return ids[index], begins


def scatter_rows(rows: npt.NDArray[Any], places: npt.NDArray[np.intp], out: npt.NDArray[Any]) -> None:
    """`out[places] = rows`. Raises IndexError for a place outside `out`, ValueError where `out` cannot be written to."""
    _check(places, len(out), "rows")
    library = _library()
    alike = rows.ndim == out.ndim == 2 and rows.dtype == out.dtype and not rows.dtype.hasobject
    usable = alike and rows.shape == (len(places), out.shape[1]) and out.flags.writeable
    if library is None or not (usable and _plain(rows) and _plain(places, np.int64) and _plain(out)):
        out[places] = rows
        return
    width = rows.shape[1] * rows.itemsize
    library.moves_scatter(rows.ctypes.data, width, places.ctypes.data, len(places), out.ctypes.data)


def _check(places: npt.NDArray[Any], count: int, what: str) -> None:
    """NumPy would count negative places from the end, and the library would not look at all."""
    if len(places) and not (int(places.min()) >= 0 and int(places.max()) < count):
        raise IndexError(f"{what} {int(places.min())} to {int(places.max())} are out of range: there are {count}")


def _plain(array: npt.NDArray[Any], dtype: type[np.generic] | None = None) -> bool:
    """True if the array is C-contiguous and of the dtype the library reads."""
    return bool(array.flags.c_contiguous and array.flags.aligned) and (dtype is None or array.dtype == dtype)


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = native.load("moves", [SOURCE])
    except NativeUnavailable as exc:
        log.info("batches are cut by NumPy: %s", exc.message)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.moves_gather.argtypes = [pointer, pointer, pointer, number, pointer, pointer]
    library.moves_gather.restype = None
    library.moves_scatter.argtypes = [pointer, number, pointer, number, pointer]
    library.moves_scatter.restype = None
    return library
