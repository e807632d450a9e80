"""How kernels are timed: as they run in earnest, not as they run when the host is slow to launch them or the cache is warm.

Where a device records its work (CUDA graphs), a round of launches is recorded once and replayed. The launches of a round
read different copies of the inputs, so that weights come from memory, as they do in a model, and not from a warm cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from anytorch import logs
from anytorch.devices.locate import locate
from anytorch.devices.stopwatch import stopwatch_of
from anytorch.errors import UsageError
from anytorch.graph.back import tickets
from anytorch.measured.stopwatch import Run, Stopwatch

log = logs.logger(__name__)

LAUNCHES = 12  # in a recorded round
MOST_COPIES = 12
CALLED_ROUNDS, CALLED_S, CALLS = 7, 2e-3, 50  # of calls by the host: rounds, seconds of one, and the most calls in it
CACHES = 4  # times the cache: what all copies together have at least


@contextmanager
def unobserved() -> Iterator[None]:
    """Without the modes that watch or change torch's calls in this thread.

    torch runs the first call of every compiled graph under a mode of its own, where each of its ops takes 20 µs more and a
    kernel of ours does not: a search there measured the mode. A program's own modes (a counter of operations, a default
    device) have no business with a search either.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        backend, index = locate(device)
        caps, module = backend.caps(index), torch.get_device_module(device)
        self._records = caps.graphs and hasattr(module, "CUDAGraph")
        # A device of ours that records by another name. One that shares the host's memory may be software, and so slow that
        # a round of launches takes minutes: it is timed launch by launch.
        self._tapes = caps.graphs and not self._records and hasattr(module, "Graph") and not caps.unified_memory
        self.plain = plain = stopwatch_of(device)  # of single calls, launches and all
        self.stopwatch = plain
        if self._records or self._tapes:
            self.stopwatch = Stopwatch(partial(_shared, plain.seconds), plain.is_passing, plain.now)

    def copies(self, inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The inputs, and copies of them that together are larger than the device's cache."""
        if not self._records and not self._tapes:
            return [list(inputs)]
        found = torch.cuda.get_device_properties(self.device) if self._records else None
        cache = int(getattr(found, "L2_cache_size", 0) or 1 << 26)
        nbytes = sum(tensor.nbytes for tensor in inputs) or 1
        count = max(1, min(MOST_COPIES, -(-CACHES * cache // nbytes)))
        return [list(inputs), *([tensor.clone() for tensor in inputs] for _ in range(count - 1))]

    def timed(self, runs: Sequence[Callable[[], Any]]) -> Run:
        """What is timed: a replay of launches on one set of inputs after another, or the first run by itself."""
        if self._tapes:
            return self._taped(runs)
        if not self._records:
            return runs[0]
        graph = torch.cuda.CUDAGraph()
        kept: list[Any] = []
        torch.cuda.synchronize(self.device)
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(2):
                runs[0]()
        stream.synchronize()
        with tickets.borrowed(self.device) as block, torch.cuda.graph(graph, stream=stream):
            kept.append(block)
            for number in range(LAUNCHES):
                kept.append(runs[number % len(runs)]())
        return _Replay(graph, kept)

    def _taped(self, runs: Sequence[Callable[[], Any]]) -> Run:
        for run in runs[:2]:  # kernels are compiled and chosen before anything is recorded
            run()
        graph = torch.get_device_module(self.device).Graph()
        try:
            with graph.alone():
                kept = [runs[number % len(runs)]() for number in range(LAUNCHES)]
        except UsageError as exc:  # an op of it runs on the CPU, or somebody is recording: it is timed as it runs then
            log.info("a round of launches cannot be recorded: %s", exc)
            return lambda: [runs[number % len(runs)]() for number in range(LAUNCHES)]
        return _Replay(graph, kept)

    def times_when_called(self, runs: Mapping[str, Run], beside: Run) -> dict[str, float]:
        """What each takes as a multiple of what `beside` takes, called one after another by the host, in turns.

        The stopwatch of a device that records leaves launches out. A kernel that takes less time there may take more of the
        host's, and where nobody records, the host is what a program of small kernels waits for. Empty where nothing is
        recorded: the stopwatch times calls then.
        """
        if not self._records:
            return {}
        every = {**{f"run {name}": run for name, run in runs.items()}, "beside": beside}
        least = dict.fromkeys(every, math.inf)
        for run in every.values():
            self.plain.seconds(run, 2)
        count = max(1, min(CALLS, int(CALLED_S / max(1e-6, self.plain.seconds(beside, 2)))))
        for _ in range(CALLED_ROUNDS):
            for name, run in every.items():
                least[name] = min(least[name], self.plain.seconds(run, count))
        return {name: least[f"run {name}"] / least["beside"] for name in runs}


class _Replay:
    """A recorded round. It keeps what the launches wrote to, because the recording holds addresses only."""

    def __init__(self, graph: Any, kept: list[Any]) -> None:
        self._graph, self._kept = graph, kept

    def __call__(self) -> None:
        self._graph.replay()


def _shared(seconds: Callable[[Run, int], float], run: Run, count: int) -> float:
    return seconds(run, count) / LAUNCHES
