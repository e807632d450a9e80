"""How long the GPU worked, by its own clock: every compute pass writes the time of its start and of its end.

Copies between passes and transfers are not counted. Counting costs two timestamps for each pass, of many launches each, so
a whole program can be measured; `Profile` measures single launches.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anytorch.gpu.native import STORAGE, ffi, lib, raising, wgpu

if TYPE_CHECKING:
    from anytorch.gpu.runtime import Runtime

TIMESTAMPS = "timestamp-query"  # the feature this needs
QUERIES = 4096  # WebGPU: maximum query count; two for each pass
MOST_UNREAD = 16  # full sets of times kept on the GPU before they are read, which waits for it


class Meter:
    """Adds up the compute passes of one runtime from now on: `runtime.meter = Meter(runtime)`, then `meter.seconds()`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        with raising("making timestamp queries"):
            self._queries: Any = runtime.device.create_query_set(type=wgpu.QueryType.timestamp, count=QUERIES)
        self._used = 0
        self._seconds = 0.0
        self._unread: list[tuple[Any, int]] = []  # buffers of times, and how many of them
        self._period = float(lib.wgpuQueueGetTimestampPeriod(runtime.device.queue._internal)) * 1e-9
        # H: WGPUPassTimestampWrites { nextInChain; WGPUQuerySet querySet; uint32_t beginningOf…, endOfPassWriteIndex }
        self._writes: Any = ffi.new("WGPUPassTimestampWrites *")
        self._writes.querySet = self._queries._internal
        self._descriptor: Any = ffi.new("WGPUComputePassDescriptor *")
        self._descriptor.timestampWrites = self._writes

    def of_next_pass(self) -> Any:
        """The descriptor of a pass that is about to be opened (the runtime calls it, with its lock)."""
        if self._used == QUERIES:
            self._resolve()
            if len(self._unread) > MOST_UNREAD and self._runtime.recorder is None:
                self._read()
        self._writes.beginningOfPassWriteIndex, self._writes.endOfPassWriteIndex = self._used, self._used + 1
        self._used += 2
        return self._descriptor

    def seconds(self) -> float:
        """The passes that were recorded so far, together. Waits for them."""
        with self._runtime.lock:
            self._resolve()
            self._read()
            return self._seconds

    def _resolve(self) -> None:
        """Copy the times to a buffer of their own, after the passes that write them."""
        if not self._used:
            return
        usage = STORAGE | int(wgpu.BufferUsage.QUERY_RESOLVE)
        buffer = self._runtime.create_buffer(self._used * 8, usage)
        self._runtime.resolve_queries(self._queries._internal, self._used, buffer._internal)
        self._unread.append((buffer, self._used))
        self._used = 0

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for buffer, count in unread:
            ticks = read_ticks(self._runtime, buffer, count)
            ticked = sum(max(0, end - start) for start, end in zip(ticks[::2], ticks[1::2], strict=True))
            self._seconds += ticked * self._period


def read_ticks(runtime: Runtime, buffer: Any, count: int) -> Sequence[int]:
    """Times that `resolve_queries` has written to a buffer."""

    class Plain:  # as much of a `Buffer` as a read looks at
        handle = buffer._internal
        nbytes = count * 8

    host = (ctypes.c_uint64 * count)()
    runtime.read(Plain(), 0, ctypes.addressof(host), count * 8)  # type: ignore[arg-type]
    return list(host)
