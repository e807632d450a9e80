"""How a torch device is timed: by its own events where it has them, else by the wall clock around a wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from anytorch import settings
from anytorch.devices.locate import locate
from anytorch.devices.memory import synchronize
from anytorch.devices.oom import is_out_of_memory
from anytorch.measured.stopwatch import Run, Stopwatch, by_wall

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
COMPILING = 10  # times the setting: a kernel of Triton takes a second or more to compile


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch for `device`; a lack of its memory is a passing accident."""
    import torch

    if device.type == "cpu":
        return Stopwatch(is_passing=is_out_of_memory)
    wait = partial(synchronize, device)
    event = getattr(torch.get_device_module(device), "Event", None)
    seconds = _by_events(event, wait) if callable(event) else by_wall(wait)
    return Stopwatch(lambda run, count: on_device(device, partial(seconds, run, count)), is_out_of_memory)


def on_device(device: torch.device, task: Callable[[], T]) -> T:
    """What `task` returns, called with `device` as the current one: events and kernels belong to that, and a thread begins
    on the first device, whichever its maker was using."""
    import torch

    scope = getattr(torch.get_device_module(device), "device", None)
    if device.index is None or not callable(scope):
        return task()
    with scope(device):
        return task()


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
