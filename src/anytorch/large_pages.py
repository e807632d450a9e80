"""Large pages for memory that was not written to yet: a read from end to end then takes few address look-ups."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import cache
from typing import Any

NBYTES = 2 << 20  # of a large page on x86-64 and most arm64
ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


def ask(address: int, nbytes: int) -> None:
    """Ask the system for large pages in this range. Whole ones only, as a last one in part would take more memory than was
    asked for. Where it is refused, small ones do."""
    first, last = -(-address // NBYTES) * NBYTES, (address + nbytes) // NBYTES * NBYTES
    if first < last and (madvise := _madvise()) is not None:
        madvise(first, last - first, ADVICE)


@cache
def _madvise() -> Any:
    # H: int madvise(void* addr, size_t length, int advice)
    if ADVICE is None:
        return None
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL(None).madvise
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return function
    return None
