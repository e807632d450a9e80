"""How long each launch takes on the GPU, by the GPU's own clock (timestamp queries inside the compute pass)."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

from anytorch.counts import counted
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import DeviceUnavailable, UsageError
from anytorch.gpu.meter import read_ticks
from anytorch.gpu.native import STORAGE, lib, raising, wgpu
from anytorch.gpu.runtime import Runtime
from anytorch.measured.stopwatch import Run, Stopwatch, by_wall

TIMESTAMPS = "timestamp-query-inside-passes"  # the feature this needs
MOST_LAUNCHES = 2048  # a query set holds at most 4096 timestamps (WebGPU: maximum query count)


@dataclass(frozen=True)
class Launch:
    """One kernel's time. `kernel` is the key its program was made with."""

    kernel: str
    seconds: float


class Profile:
    """`with Profile(runtime) as profile: …`, then `profile.launches` and `profile.table()`.

    Every launch is timed from its own start to its own end; what the GPU does between them is not counted. Launches beyond
    `MOST_LAUNCHES` are run and not timed (`missed`).
    """

    def __init__(self, runtime: Runtime) -> None:
        if TIMESTAMPS not in runtime.features:
            raise DeviceUnavailable(f"{runtime.adapter.name} ({runtime.adapter.api}) has no timestamps inside passes")
        self._runtime = runtime
        self._names: list[str] = []
        self.missed = 0
        self.launches: list[Launch] = []
        self._queries: Any = None

    def __enter__(self) -> Profile:
        runtime = self._runtime
        if runtime.profiler is not None:
            raise UsageError("another profile is under way; one at a time")
        runtime.wait()
        with raising("making timestamp queries"):
            self._queries = runtime.device.create_query_set(type=wgpu.QueryType.timestamp, count=2 * MOST_LAUNCHES)
        runtime.profiler = self
        return self

    def before_launch(self, encoder: Any, program: Any) -> bool:
        """Called by the runtime; False: there is no query left."""
        if len(self._names) >= MOST_LAUNCHES:
            self.missed += 1
            return False
        # H: void f(WGPUComputePassEncoder computePassEncoder, WGPUQuerySet querySet, uint32_t queryIndex)
        lib.wgpuComputePassEncoderWriteTimestamp(encoder, self._queries._internal, 2 * len(self._names))
        self._names.append(str(program.key))
        return True

    def after_launch(self, encoder: Any) -> None:
        lib.wgpuComputePassEncoderWriteTimestamp(encoder, self._queries._internal, 2 * len(self._names) - 1)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        runtime = self._runtime
        runtime.profiler = None
        count = 2 * len(self._names)
        if kind is not None or not count:
            return
        with runtime.lock:
            resolved = runtime.create_buffer(count * 8, STORAGE | int(wgpu.BufferUsage.QUERY_RESOLVE))
            runtime.resolve_queries(self._queries._internal, count, resolved._internal)
            ticks = read_ticks(runtime, resolved, count)
        period = float(lib.wgpuQueueGetTimestampPeriod(runtime.device.queue._internal)) * 1e-9
        self.launches = [
            Launch(name, max(0, ticks[2 * i + 1] - ticks[2 * i]) * period) for i, name in enumerate(self._names)
        ]

    def table(self, rows: int = 20) -> str:
        """Kernels by the time they took together."""
        total = sum(launch.seconds for launch in self.launches)
        by_name: dict[str, list[float]] = {}
        for launch in self.launches:
            by_name.setdefault(launch.kernel, []).append(launch.seconds)
        lines = [f"{'time (µs)':>10} {'share':>6} {'launches':>9}  kernel"]
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:rows]:
            lines.append(f"{sum(times) * 1e6:10.1f} {sum(times) / (total or 1):6.1%} {len(times):9d}  {name[:90]}")
        more = f", {counted(self.missed, 'launch', 'launches')} not timed" if self.missed else ""
        return "\n".join(
            [*lines, f"{total * 1e6:10.1f} µs in {counted(len(self.launches), 'launch', 'launches')}{more}"]
        )


def stopwatch_of(runtime: Runtime) -> Stopwatch:
    """How `runtime` is timed: by its timestamps where it has them, else by the wall clock.

    A lack of its memory is a passing accident.
    """
    wall = by_wall(runtime.wait)

    def by_timestamps(run: Run, count: int) -> float:
        """Seconds of one call: its launches from their own start to their own end, one after the other."""
        if runtime.profiler is not None:  # somebody is watching: there is one profile at a time
            return wall(run, count)
        with Profile(runtime) as profile:
            for _ in range(count):
                run()
        seconds = sum(launch.seconds for launch in profile.launches)
        return seconds / count if seconds and not profile.missed else wall(run, count)

    return Stopwatch(by_timestamps if TIMESTAMPS in runtime.features else wall, is_out_of_memory)
