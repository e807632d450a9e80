"""Device memory: buffers in buckets, kept for the next tensor of that size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any

from anytorch.errors import DeviceLost, OutOfMemory

if TYPE_CHECKING:
    from anytorch.gpu.launcher import Launcher

# A tensor's address is made up: a tag bit, the buffer's number, the byte offset within it. The tag keeps a real pointer of
# the CPU from ever being taken for one of ours, and 36 bits of offset are 64 GiB per buffer.
TAG = 1 << 62
SHIFT = 36
OFFSET_MASK = (1 << SHIFT) - 1


class Buffer:
    """One GPU buffer."""

    __slots__ = ("__weakref__", "address", "handle", "key", "nbytes", "owner", "pins")

    def __init__(self, owner: Any, handle: Any, nbytes: int, number: int) -> None:
        self.owner = owner  # wgpu's object, which destroys the buffer
        self.handle = handle  # its C handle
        self.nbytes = nbytes
        self.address = TAG | number << SHIFT
        self.key = self.address >> SHIFT
        self.pins = 0  # tapes that will write to it again


@dataclass
class PoolStatistics:
    allocated: int = 0  # bytes in buffers that are in use
    reserved: int = 0  # bytes in all buffers
    peak_allocated: int = 0
    peak_reserved: int = 0
    created: int = 0
    reused: int = 0


# Counted over all devices of the process: a tensor of a lost device must not find a buffer of the next one.
_numbers = count(1)


class Buffers(dict[int, Buffer]):
    """Buffers by key. A key that is not there belongs to a device that has been reset, or to a buffer given up with it."""

    def __missing__(self, key: int) -> Buffer:
        if not key << SHIFT & TAG:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but got a tensor on another device than webgpu:0; "
                "move it with .to('webgpu')"
            )
        raise DeviceLost(
            "webgpu: this tensor was on a device that has been reset; its memory is gone",
            hint="load it again from the host or from disk",
        )


@lru_cache(maxsize=4096)  # every small op asks
def bucket(nbytes: int) -> int:
    """The size a buffer is made with: eight steps per doubling, so at most an eighth is wasted; 256 bytes at least."""
    if nbytes <= 256:
        return 256
    step = max(256, 1 << ((nbytes - 1).bit_length() - 4))
    return -(-nbytes // step) * step


class Pool:
    """Hands out buffers and takes them back.

    Not locked: the runtime's lock is held by every caller, except that `returned.append(buffer)` gives a buffer back from
    anywhere, also from a finaliser that runs in the middle of something else; the next `take` sorts it in.
    """

    def __init__(
        self, create: Callable[[int], Any], destroy: Callable[[Buffer], None], largest: int, limit: int | None = None
    ) -> None:
        self._create = create
        self._destroy = destroy
        self.largest = largest
        self.limit = limit  # bytes that may be reserved in all; None: as many as the device gives
        self.buffers = Buffers()  # by key, for finding a tensor's buffer from its address
        self.returned: deque[Buffer] = deque()
        self.frozen = False
        self.launcher: Launcher | None = None  # takes buffers back as well, and hands them out again
        self._statistics = PoolStatistics()
        self._free: dict[int, list[Buffer]] = {}
        self._parked: set[Buffer] = set()  # given back, but pinned
        self._reused = 0  # by the launcher, as counted last

    def take(self, nbytes: int, relieve: Callable[[], None]) -> Buffer:
        """A buffer of at least `nbytes`. When the device is full, `relieve` is called and unused buffers are given up."""
        size = bucket(nbytes)
        statistics = self._statistics
        if self.launcher is not None:
            self.returned.extend(self.launcher.returned())
        if self.returned:
            buffer = self.returned.pop()
            if buffer.nbytes == size and not buffer.pins:  # given back a moment ago: as much is in use as before
                statistics.reused += 1
                return buffer
            self.returned.append(buffer)
            self._sort_in()
        free = self._free.get(size)
        if free:
            buffer = free.pop()
            statistics.reused += 1
        else:
            buffer = self._new(size, nbytes, relieve)
        statistics.allocated += buffer.nbytes
        if statistics.allocated > statistics.peak_allocated:
            statistics.peak_allocated = statistics.allocated
        return buffer

    def _new(self, size: int, nbytes: int, relieve: Callable[[], None]) -> Buffer:
        if size > self.largest:
            size = -(-nbytes // 256) * 256
        if size > self.largest:
            raise OutOfMemory(
                f"webgpu: one tensor of {nbytes:,} bytes exceeds this adapter's largest buffer, {self.largest:,} bytes",
                hint="split the tensor, or use a smaller dtype",
            )
        try:
            made = self._attempt(size)
        except OutOfMemory:
            relieve()
            self.release_free()
            made = self._attempt(size)
        buffer = Buffer(made, made._internal, size, next(_numbers))
        self.buffers[buffer.key] = buffer
        statistics = self._statistics
        statistics.created += 1
        statistics.reserved += size
        statistics.peak_reserved = max(statistics.peak_reserved, statistics.reserved)
        return buffer

    def apart(self, nbytes: int) -> Buffer:
        """A buffer of the runtime's own, found by its address like any other: never handed out, in no statistics."""
        made = self._create(bucket(nbytes))
        buffer = Buffer(made, made._internal, bucket(nbytes), next(_numbers))
        self.buffers[buffer.key] = buffer
        return buffer

    def _attempt(self, size: int) -> Any:
        if self.limit is not None and self.statistics.reserved + size > self.limit:
            raise OutOfMemory(
                f"webgpu: {size:,} bytes do not fit: {self.statistics.allocated:,} are in use and the limit is "
                f"{self.limit:,} bytes (ANYTORCH_WEBGPU_MEMORY)",
                hint="free tensors, use a smaller batch, or raise the limit",
            )
        return self._create(size)

    @property
    def statistics(self) -> PoolStatistics:
        self._sort_in()
        if self.launcher is not None:
            count = self.launcher.reused()
            self._statistics.reused += count - self._reused
            self._reused = count
        return self._statistics

    def _sort_in(self) -> None:
        returned, free, statistics = self.returned, self._free, self._statistics
        if self.launcher is not None:
            returned.extend(self.launcher.returned())
        while returned:
            buffer = returned.popleft()
            if buffer.pins:
                self._parked.add(buffer)
                continue
            statistics.allocated -= buffer.nbytes
            if buffer.nbytes in free:
                free[buffer.nbytes].append(buffer)
            else:
                free[buffer.nbytes] = [buffer]

    def pin(self, buffers: Iterable[Buffer]) -> None:
        """Keep buffers from being handed out, whether they are in use or free."""
        self._sort_in()
        for buffer in buffers:
            buffer.pins += 1
            self._tell_pins(buffer)
            free = self._free.get(buffer.nbytes, [])
            if buffer in free:
                free.remove(buffer)
                self._statistics.allocated += buffer.nbytes
                self._parked.add(buffer)

    def unpin(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            buffer.pins -= 1
            self._tell_pins(buffer)
            if not buffer.pins and buffer in self._parked:
                self._parked.discard(buffer)
                self.returned.append(buffer)

    def _tell_pins(self, buffer: Buffer) -> None:
        if self.launcher is not None:
            self.launcher.pin(buffer.key, buffer.pins)

    def release_free(self) -> int:
        """Destroy every buffer nobody uses; returns the bytes given back. (None while a tape records: it may name any.)"""
        if self.frozen:
            return 0
        self._sort_in()
        given = 0
        for free in self._free.values():
            for buffer in free:
                del self.buffers[buffer.key]
                if self.launcher is not None:
                    self.launcher.remove(buffer.key)
                given += buffer.nbytes
                self._destroy(buffer)
        self._free.clear()
        self._statistics.reserved -= given
        return given
