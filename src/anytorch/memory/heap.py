"""Memory that a program freed and its allocator keeps: given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any


def trim() -> None:
    """Give free pages of malloc's heap back, those between others too; nothing where there is no glibc.

    It serves what is smaller than 32 MiB from its heap once as much was freed, and a model's weights are.
    """
    if (function := _malloc_trim()) is not None:
        function(0)


@cache
def _malloc_trim() -> Any:
    # H: int malloc_trim(size_t pad)
    with contextlib.suppress(OSError, AttributeError, TypeError):  # Windows; musl and macOS; Windows with None
        function = ctypes.CDLL(None).malloc_trim
        function.argtypes = [ctypes.c_size_t]
        return function
    return None
