"""Host memory that disks and devices like: page-aligned, touched once, pinned where the device gains by it."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import TYPE_CHECKING

from anytorch import large_pages, logs
from anytorch.memory.sizes import PAGE

if TYPE_CHECKING:
    import torch

log = logs.logger(__name__)
SEGMENT = 2**30  # the largest single pinned allocation
# Private pages: shared ones would not count as the process's own.
ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if sys.platform != "win32" else None


def host_buffer(nbytes: int, *, pinned: bool = False, lasting: bool = False) -> torch.Tensor:
    """A page-aligned uint8 tensor on the CPU, every page of it touched: first touches cost as much as a disk read.

    `lasting`: of pages that are its own and go back to the system with it. The allocator's heap, which serves others, keeps
    what it was given for a while: gaps beside long-lived buffers, and the activations of passes on top of those.

    Large ones ask for large pages. A direct read into small pages is cut into pieces of one page each, of which a disk takes
    a few hundred at a time: with large pages the same disk gave 2.7 times the rate.
    """
    import torch

    if pinned:
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, NotImplementedError, AssertionError) as exc:
            log.info("pinned memory does not work here, using pageable: %s", str(exc).splitlines()[0])
        else:
            if buffer.data_ptr() % PAGE == 0:
                return buffer
    alignment = large_pages.NBYTES if nbytes >= large_pages.NBYTES else PAGE
    raw = _own_pages(nbytes + alignment) if lasting else torch.empty(nbytes + alignment, dtype=torch.uint8)
    start = -raw.data_ptr() % alignment
    buffer = raw[start : start + nbytes]
    large_pages.ask(buffer.data_ptr(), nbytes)
    return buffer.zero_()


def _own_pages(nbytes: int) -> torch.Tensor:
    """Memory straight from the system; unmapped when the last tensor that views it goes."""
    import torch

    if ANONYMOUS is None:
        return torch.empty(nbytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=ANONYMOUS), dtype=torch.uint8)


def bytes_of(buffer: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a writable view. Valid as long as the tensor is."""
    if not buffer.numel():
        return memoryview(bytearray())
    array = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
    return memoryview(array).cast("B")


class HostArena:
    """At most `nbytes` of host memory, handed out in pieces and allocated as they are asked for.

    torch's pinned allocator rounds every request up to a power of two, which made other libraries use almost twice the
    memory they were allowed. So it is asked for powers of two only, and what is stored may be cut into several pieces.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._left = nbytes  # not allocated yet
        self._segment: torch.Tensor | None = None
        self._at = 0

    def take(self, nbytes: int) -> list[torch.Tensor]:
        """The next `nbytes`, as one or more uint8 tensors. Asking for more than there is left is a bug."""
        pieces: list[torch.Tensor] = []
        while nbytes:
            if self._segment is None or self._at == self._segment.numel():
                self._next_segment()
            assert self._segment is not None
            part = min(nbytes, self._segment.numel() - self._at)
            pieces.append(self._segment[self._at : self._at + part])
            self._at += part
            nbytes -= part
        return pieces

    def _next_segment(self) -> None:
        assert self._left > 0, "the arena is full: more bytes were requested than it was made for"
        size = min(SEGMENT, 2 ** (self._left.bit_length() - 1)) if self._left >= PAGE else self._left
        self._segment, self._at = host_buffer(size, pinned=self._pinned and size >= PAGE, lasting=True), 0
        self._left -= size


def scatter(source: torch.Tensor, pieces: list[torch.Tensor], start: int = 0) -> None:
    """Write a run of bytes into a piecewise store, beginning at byte `start` of it."""
    at = 0
    for part in parts_of(pieces, start, source.numel()):
        part.copy_(source[at : at + part.numel()])
        at += part.numel()


def gather(pieces: list[torch.Tensor], target: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Read a piecewise store back into one run of bytes."""
    at = 0
    for part in parts_of(pieces, 0, target.numel()):
        target[at : at + part.numel()].copy_(part, non_blocking=non_blocking)
        at += part.numel()


def parts_of(pieces: list[torch.Tensor], start: int, nbytes: int) -> list[torch.Tensor]:
    """A run of bytes of a piecewise store as views of its pieces, beginning at byte `start` of it."""
    parts = []
    for piece in pieces:
        part = piece[start : start + nbytes]  # empty where the run begins after this piece
        if part.numel():
            parts.append(part)
        nbytes -= part.numel()
        start = max(0, start - piece.numel())
        if not nbytes:
            break
    return parts
