"""Recording the work of one shape and replaying it: a batch then costs the host microseconds instead of milliseconds.

Every vendor's module names the same things a little differently; they are found by what they can do. Graphs share one
memory pool: they run one after the other on one stream, so that only inputs and outputs must stay apart.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytorch import logs
from anytorch.errors import UsageError

log = logs.logger(__name__)

MOST_GRAPHS = 32
WARM_UPS = 2  # libraries choose kernels and allocate workspaces on first use, which a recording may not


@dataclass
class Recording:
    graph: Any
    output: Tensor

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


class Recorder:
    """Recordings by shape. A shape is recorded when it comes a second time: many come only once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = torch.get_device_module(device)
        self.recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self.seen: set[Hashable] = set()
        self.failed = ""  # why recording was given up; it is not tried again
        self._pool: Any = None

    def run(self, shape: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """The answer of `work`, replayed where it has been recorded. It must read its inputs from the same tensors."""
        recording = self.recordings.get(shape)
        if recording is not None:
            self.recordings.move_to_end(shape)
            return recording.replay()
        if self.failed or shape not in self.seen:
            self.seen.add(shape)
            return work()
        return self.record(shape, work)

    def record(self, shape: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """Record `work` now and run it. A device that cannot do it computes plainly from then on, and says why."""
        try:
            recording = self._capture(work)
        except (
            RuntimeError,
            TypeError,
            AttributeError,
            UsageError,
        ) as exc:  # the last: webgpu's, of what a tape cannot hold
            if not self.recordings:
                said = str(exc).splitlines()[0][:200]
                self.failed = said if isinstance(exc, UsageError) else f"{type(exc).__name__}: {said}"
                log.info("%s records no graphs: %s", self.device, self.failed)
            else:
                self.seen.discard(shape)
            return work()
        while len(self.recordings) >= MOST_GRAPHS:
            self.recordings.popitem(last=False)
        self.recordings[shape] = recording
        return recording.replay()

    def _capture(self, work: Callable[[], Tensor]) -> Recording:
        kind = graph_class(self.module)
        if kind is None:
            raise UsageError(f"{self.module.__name__} has no graph to record into")
        record = getattr(self.module, "graph", None)
        if not callable(record):  # `with graph:` records by itself
            for _ in range(WARM_UPS):
                work()
            graph = kind()
            with graph:
                output = work()
            return Recording(graph, output)
        stream = side_stream(self.module, self.device)
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            for _ in range(WARM_UPS):
                work()
        self.module.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = self.module.graph_pool_handle()
        graph = kind()
        with record(graph, pool=self._pool, stream=stream, **others_left_alone(record)):
            output = work()
        return Recording(graph, output)

    def clear(self) -> None:
        self.recordings.clear()
        self.seen.clear()


_streams = threading.local()  # two threads that record at once must not meet on one


def others_left_alone(record: Callable[..., Any]) -> dict[str, str]:
    """Arguments that let other threads (another engine, a copy) use the device during a recording."""
    known = "capture_error_mode" in inspect.signature(record).parameters
    return {"capture_error_mode": "thread_local"} if known else {}


def side_stream(module: Any, device: torch.device) -> Any:
    """This thread's stream for recording on a device, always the same one.

    Libraries keep a workspace for every stream they have seen (cuBLAS 32 MiB on an H200), so a new stream per recording took
    up to a gigabyte.
    """
    known: dict[torch.device, Any] = _streams.__dict__.setdefault("by_device", {})
    if device not in known:
        known[device] = module.Stream(device)
    return known[device]


def graph_class(module: Any) -> Callable[[], Any] | None:
    """`CUDAGraph`, `XPUGraph`, `NPUGraph`, `Graph`: whatever a device's module calls it."""
    names = [name for name in dir(module) if name.endswith("Graph") and not name.startswith("_")]
    found = sorted(names, key=len, reverse=True)
    return getattr(module, found[0]) if found else None
