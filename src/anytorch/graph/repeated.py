"""A long tensor on the CPU that repeats a few numbers, of the memory that those few need.

On Linux the same pages are mapped one after another: nothing is copied, nothing is filled, and what reads it finds it in the
cache. Making and freeing 340 MiB of inputs took 190 ms, and takes 20 ms. Elsewhere it is copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import lru_cache
from typing import Any

import torch

from anytorch import logs

log = logs.logger(__name__)

BLOCK = (
    (1 << 20) // mmap.PAGESIZE + 1
) * mmap.PAGESIZE  # bytes; an odd number of pages, as rows are even numbers of bytes
MOST_TIMES = 1 << 13  # of 65,530 mappings that a process may have on Linux; what is longer is copied
# Linux's numbers for mmap(2), which the module `mmap` does not name.
MAP_FIXED, MAP_NORESERVE, PROT_NONE = 0x10, 0x4000, 0x0


def period(dtype: torch.dtype) -> int:
    """How many numbers a block has: those that `repeated` takes."""
    return BLOCK // dtype.itemsize


def repeated(few: torch.Tensor, count: int) -> torch.Tensor:
    """`count` numbers: these `period(few.dtype)` again and again. Whoever writes to one may write to many."""
    block = few.contiguous().view(torch.uint8).numpy().tobytes()
    if len(block) != BLOCK:
        raise ValueError(f"few has {few.numel()} numbers, not {period(few.dtype)}")
    buffer = _mapped(block, -(-count // few.numel()))
    if buffer is None:
        return few.repeat(-(-count // few.numel()))[:count]
    return torch.frombuffer(buffer, dtype=few.dtype, count=count)


def refill(made: torch.Tensor, few: torch.Tensor) -> None:
    """Put other numbers in place of those that `repeated` made this tensor of."""
    count = few.numel()
    for start in range(0, made.numel(), count):
        part = made[start : start + count]
        if start == count and torch.equal(part, few[: part.numel()]):
            return  # mapped: the first block shows in all of them
        part.copy_(few[: part.numel()])


def _mapped(block: bytes, times: int) -> Any:
    """A buffer that shows the block so many times, one after another; None where that cannot be had."""
    if not hasattr(os, "memfd_create") or times > MOST_TIMES:
        return None
    libc, total = _libc(), times * len(block)
    base = file = None
    try:
        file = os.memfd_create("anytorch")
        os.truncate(file, len(block))
        with mmap.mmap(file, len(block)) as page:
            page[:] = block
        # A range of addresses of our own first: MAP_FIXED replaces whatever lies where it maps.
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        base = _address(libc.mmap(None, total, PROT_NONE, kind, -1, 0))
        for offset in range(0, total, len(block)):
            access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
            _address(libc.mmap(base + offset, len(block), access, kind, file, 0))
    except OSError as exc:
        log.info("memory is copied instead of mapped %d times: %s", times, exc.strerror)
        if base is not None:
            libc.munmap(base, total)
        return None
    finally:
        if file is not None:
            os.close(file)  # the mappings keep it
    buffer = (ctypes.c_char * total).from_address(base)
    weakref.finalize(buffer, libc.munmap, base, total).atexit = False
    return buffer


def _address(found: int) -> int:
    if found == ctypes.c_void_p(-1).value:  # MAP_FAILED
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    # void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
    numbers = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mmap.argtypes, libc.mmap.restype = [ctypes.c_void_p, ctypes.c_size_t, *numbers], ctypes.c_void_p
    libc.munmap.argtypes, libc.munmap.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int
    return libc
