"""How a GPU of this runtime is timed: by its own timestamps where it has them, else by the wall clock."""

from __future__ import annotations

from anytorch.devices.oom import is_out_of_memory
from anytorch.gpu.profile import TIMESTAMPS, Profile
from anytorch.gpu.runtime import Runtime
from anytorch.measured.stopwatch import Run, Stopwatch, by_wall


def stopwatch_of(runtime: Runtime) -> Stopwatch:
    """The stopwatch for `runtime`; a lack of its memory is a passing accident."""
    wall = by_wall(runtime.synchronize)

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
