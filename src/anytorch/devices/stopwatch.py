"""How a torch device is timed: by its own events where it has them, else by the wall clock around a wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from anytorch import settings
from anytorch.devices.locate import locate
from anytorch.devices.memory import synchronize
from anytorch.devices.oom import is_out_of_memory
from anytorch.measured.stopwatch import Run, Stopwatch, by_wall

if TYPE_CHECKING:
    import torch

COMPILING = 10  # times the setting: a kernel of Triton takes a second or more to compile


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch for `device`; a lack of its memory is a passing accident."""
    import torch

    wait = (lambda: None) if device.type == "cpu" else partial(synchronize, device)
    event = None if device.type == "cpu" else getattr(torch.get_device_module(device), "Event", None)
    return Stopwatch(_by_events(event, wait) if callable(event) else by_wall(wait), is_out_of_memory)


def budget_of(device: torch.device) -> float:
    """Seconds that a measurement on `device` may take: the setting, or more where every candidate is compiled first."""
    backend, index = locate(device)
    return float(settings.get("measure_s")) * (COMPILING if backend.caps(index).triton else 1)


def _by_events(event: Callable[..., Any], wait: Callable[[], object]) -> Callable[[Run, int], float]:
    """Seconds between two events on the device's current stream: how long the host took to notice is not counted."""

    def seconds(run: Run, count: int) -> float:
        begin, end = event(enable_timing=True), event(enable_timing=True)
        wait()
        begin.record()
        for _ in range(count):
            run()
        end.record()
        wait()
        return float(begin.elapsed_time(end)) * 1e-3 / count

    return seconds
