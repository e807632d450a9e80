"""To the device and back, through mapped staging buffers.

Uploads are copied into a mapped arena at once and recorded as a copy in the command stream, so they keep their place among
the kernels without a submission of their own. (`queue.write_buffer` would run before everything not yet submitted, and
mappable device buffers cost five to ten times the bandwidth on a discrete card.)
"""

from __future__ import annotations

import ctypes
from collections import deque
from concurrent.futures import Future
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anytorch.gpu.buffers import Buffer
from anytorch.gpu.native import READBACK, UPLOAD, GpuError, ffi, lib
from anytorch.gpu.wgsl.faults import NBYTES as FAULT_NBYTES
from anytorch.interrupts import held_back
from anytorch.workers import Workers

if TYPE_CHECKING:
    from anytorch.gpu.runtime import Runtime

ARENA = 8 << 20
SMALL_READ = 1 << 16
PARALLEL = 2 << 20  # a memmove from here on is shared among threads: page faults, not bandwidth, are its limit
PIECE = 2 << 20  # waking a thread costs as much as moving half a megabyte
THREADS = 16
IN_FLIGHT = 8
SPIN_S = 200e-6  # of asking whether a read is done, before waiting to be woken

_workers: list[Workers] = []


def start_move(destination: int, source: int, nbytes: int) -> Future[Any]:
    """memmove on another thread; ctypes drops the GIL for it."""
    if not _workers:
        import os

        _workers.append(Workers(min(THREADS, os.cpu_count() or 1), thread_name_prefix="anytorch-copy"))
    return _workers[0].submit(ctypes.memmove, destination, source, nbytes)


def move(destination: int, source: int, nbytes: int) -> None:
    """memmove; a large one in parallel."""
    if nbytes < PARALLEL:
        ctypes.memmove(destination, source, nbytes)
        return
    tasks = [start_move(destination + at, source + at, min(PIECE, nbytes - at)) for at in range(0, nbytes, PIECE)]
    for task in tasks:
        task.result()


_interrupts: list[BaseException] = []


def _keep_interrupt(kind: Any, value: BaseException, trace: Any) -> None:
    """Ctrl-C can arrive at the first line of the callback below, which cannot raise: the waiting thread raises it."""
    _interrupts.append(value)


@ffi.callback(  # type: ignore[untyped-decorator]
    "void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", onerror=_keep_interrupt
)
def _on_mapped(status: int, message: Any, first: Any, second: Any) -> None:
    ffi.from_handle(first).append(status)


class Staging:
    """One mappable buffer and whether it is mapped. One the host writes to is mapped when it is made, the others not."""

    __slots__ = ("_box", "_info", "_status", "_write", "handle", "nbytes", "owner", "pointer")

    def __init__(self, runtime: Runtime, nbytes: int, *, write: bool) -> None:
        self.owner = runtime.create_buffer(nbytes, UPLOAD if write else READBACK, mapped=write)
        self.handle = self.owner._internal
        self.nbytes = nbytes
        self._write = write
        self._status: list[int] = []
        self._box: Any = ffi.new_handle(self._status)
        self._info = ffi.new("WGPUBufferMapCallbackInfo *")
        self._info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        self._info.callback = _on_mapped
        self._info.userdata1 = self._box
        self.pointer = self._range() if write else 0

    def _range(self) -> int:
        function = lib.wgpuBufferGetMappedRange if self._write else lib.wgpuBufferGetConstMappedRange
        return int(ffi.cast("uintptr_t", function(self.handle, 0, self.nbytes)))

    def unmap(self) -> None:
        lib.wgpuBufferUnmap(self.handle)
        self.pointer = 0

    def start_mapping(self) -> None:
        self._status.clear()
        # H: WGPUFuture f(WGPUBuffer, WGPUMapMode mode, size_t offset, size_t size, WGPUBufferMapCallbackInfo)
        lib.wgpuBufferMapAsync(self.handle, 2 if self._write else 1, 0, self.nbytes, self._info[0])

    def answer_was_lost(self) -> None:
        """The device has nothing left to do, so the mapping has been answered, but an interrupt ate the answer."""
        self._status.append(lib.WGPUMapAsyncStatus_Success)

    def finished(self) -> bool:
        """Whether the mapping has been answered. Then `pointer` is set. Raises if it was refused."""
        if not self._status:
            return False
        if self._status[0] != lib.WGPUMapAsyncStatus_Success:
            raise GpuError(f"webgpu: a staging buffer could not be mapped (status {self._status[0]})")
        self.pointer = self._range()
        if not self.pointer:
            raise GpuError("webgpu: a staging buffer was not mapped")
        return True


class Uploads:
    """A chain of mapped arenas that uploads are written into."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._current: Staging | None = None
        self._used = 0
        self._full: list[Staging] = []  # written, to be unmapped before the next submission
        self._submitted: list[Staging] = []  # being mapped again
        self._ready: list[Staging] = []

    def write(self, buffer: Buffer, offset: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` (a multiple of 4) from host address `source` to `buffer` at `offset`, in stream order."""
        runtime = self._runtime
        done = 0
        while done < nbytes:
            if self._current is None:
                self._wait_for_one()
                with held_back():
                    self._current = self._ready.pop() if self._ready else Staging(runtime, ARENA, write=True)
                    self._used = 0
            arena = self._current
            part = min(nbytes - done, arena.nbytes - self._used)
            # First, as Ctrl-C may come when the copy is recorded.
            at, self._used = self._used, self._used + -(-part // 16) * 16
            move(arena.pointer + at, source + done, part)
            runtime.encode_copy(arena.handle, at, buffer.handle, offset + done, part)
            done += part
            if self._used >= arena.nbytes:
                with held_back():  # each arena is in one place
                    self._retire()
                if done < nbytes:
                    runtime.submit()  # the device copies this part while the next one is being written

    def _retire(self) -> None:
        if self._current is not None:
            self._full.append(self._current)
            self._current = None

    def _wait_for_one(self) -> None:
        """Return when an arena is ready, or when another one may be made."""
        self._collect()
        empty = False
        while not self._ready and len(self._submitted) >= IN_FLIGHT:
            if empty:
                self._submitted[0].answer_was_lost()
            empty = self._runtime.poll(wait=True)
            self._collect()

    def _collect(self) -> None:
        if self._submitted:
            self._runtime.poll(wait=False)
        with held_back():
            waiting: list[Staging] = []
            for staging in self._submitted:
                (self._ready if staging.finished() else waiting).append(staging)
            self._submitted = waiting

    def before_submit(self) -> None:
        """A mapped buffer may not be used by the device."""
        if self._current is not None and self._used:
            self._retire()
        for staging in self._full:
            staging.unmap()

    def after_submit(self) -> None:
        for staging in self._full:
            staging.start_mapping()
        self._submitted += self._full
        self._full = []


class Readbacks:
    """Staging buffers the device copies into."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._free: dict[int, list[Staging]] = {}
        # What an exception leaves behind is still being mapped: it must not be freed.
        self._in_flight: set[Staging] = set()

    def read(self, buffer: Buffer, offset: int, destination: int, nbytes: int, beside: Buffer | None = None) -> bytes:
        """Wait for the device and copy `nbytes` of `buffer` to host address `destination`.

        Returns the reports in the fault buffer `beside`, which come with the last part and need no wait of their own.
        A long read goes in arenas: while the device fills one, threads empty those before it. (On the H200's host one thread
        moves 5 GB/s out of mapped memory, the device 40 into it.)
        """
        started: deque[tuple[Staging, int, int, int]] = deque()
        moving: deque[tuple[Staging, Future[Any]]] = deque()
        at, said = 0, b""
        try:
            while at < nbytes or started:
                if at < nbytes and len(started) + len(moving) < IN_FLIGHT:
                    part = min(ARENA, nbytes - at)
                    last = beside if at + part == nbytes else None
                    started.append((*self._request(buffer, offset + at, part, last), destination + at, part))
                    at += part
                    continue
                if not started:
                    self._finish(moving.popleft())
                    continue
                staging, skip, target, part = started.popleft()
                self._wait_for(staging)
                if beside is not None and at == nbytes and not started:
                    said = ctypes.string_at(staging.pointer, FAULT_NBYTES)
                if nbytes <= ARENA:
                    ctypes.memmove(target, staging.pointer + skip, part)
                    self._give(staging)
                else:
                    moving.append((staging, start_move(target, staging.pointer + skip, part)))
        finally:
            while moving:  # nobody may free the destination while a thread writes to it
                self._finish(moving.popleft())
        if _interrupts:
            raise _interrupts.pop()
        return said

    def read_few(self, buffer: Buffer, offset: int, nbytes: int, beside: Buffer | None) -> tuple[bytes, bytes]:
        """The same for a few bytes, which are returned, and the reports: the time of a read is what it costs the host."""
        staging, skip = self._request(buffer, offset, nbytes, beside)
        self._wait_for(staging)
        said = ctypes.string_at(staging.pointer, FAULT_NBYTES) if beside is not None else b""
        data = ctypes.string_at(staging.pointer + skip, nbytes)
        self._give(staging)
        if _interrupts:
            raise _interrupts.pop()
        return data, said

    def _wait_for(self, staging: Staging) -> None:
        """Return when the staging buffer is mapped. A GPU is asked again and again first: being woken takes longer than most
        reads. A CPU adapter would compute with the core that asks."""
        poll = self._runtime.poll
        until = 0.0 if self._runtime.adapter.software else perf_counter() + SPIN_S
        empty = False
        while not staging.finished():
            if empty:
                staging.answer_was_lost()
            if perf_counter() < until:
                poll(wait=False)  # which may find the device done, and the mapping not yet answered
            else:
                empty = poll(wait=True)

    def _request(self, buffer: Buffer, offset: int, nbytes: int, beside: Buffer | None) -> tuple[Staging, int]:
        """Have the device copy a range to a staging buffer, after the reports in `beside` if that is given.

        Returns the staging buffer and where in it the range begins.
        """
        # Copies are whole multiples of 4 bytes on 4-byte boundaries (WebGPU: copyBufferToBuffer validation).
        first = offset & ~3
        length = min(-(-(offset + nbytes - first) // 4) * 4, buffer.nbytes - first)
        start = 0 if beside is None else FAULT_NBYTES
        staging = self._take(start + length)
        if beside is not None:
            self._runtime.encode_copy(beside.handle, 0, staging.handle, 0, FAULT_NBYTES)
        self._runtime.encode_copy(buffer.handle, first, staging.handle, start, length)
        self._runtime.submit()
        self._in_flight.add(staging)
        staging.start_mapping()
        return staging, start + offset - first

    def _finish(self, moved: tuple[Staging, Future[Any]]) -> None:
        moved[1].result()
        self._give(moved[0])

    def _give(self, staging: Staging) -> None:
        staging.unmap()
        self._in_flight.discard(staging)
        self._free.setdefault(staging.nbytes, []).append(staging)

    def _take(self, nbytes: int) -> Staging:
        size = 256 if nbytes <= 256 else SMALL_READ if nbytes <= SMALL_READ else 1 << 20 if nbytes <= 1 << 20 else ARENA
        if nbytes > size:
            size = -(-nbytes // 4096) * 4096
        free = self._free.get(size)
        if free:
            return free.pop()
        return Staging(self._runtime, size, write=False)
