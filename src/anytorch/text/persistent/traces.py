"""What the workers of a CPU's decoder did, and when: from the buffer they write (`code/trace.h`) to a file for Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from anytorch.errors import UsageError
from anytorch.values import dataclass

PHASES = ("begin", "words", "q k v", "attention", "out", "gate and up", "down", "logits", "choice", "waiting", "step")
LEAST_WORDS = 1024


@dataclass(frozen=True)
class Span:
    """A phase of one worker, in nanoseconds of a clock that has no beginning."""

    worker: int
    step: int
    layer: int
    phase: str
    begin_ns: int
    end_ns: int


def check_buffer(buffer: Tensor) -> Tensor:
    """A buffer as the workers write it, int64 [words]: the same memory. Raises UsageError for one that cannot be used."""
    if not isinstance(buffer, Tensor):
        raise UsageError(
            f"profiler_tensor is of type {type(buffer).__name__}, not a tensor",
            hint="torch.zeros(3000 * 128, dtype=torch.uint64)",
        )
    whole = buffer.dtype in (torch.int64, torch.uint64)
    if not whole or buffer.device.type != "cpu" or not buffer.is_contiguous() or buffer.numel() < LEAST_WORDS:
        raise UsageError(
            f"profiler_tensor is {buffer.dtype} of {list(buffer.shape)} on {buffer.device}; it needs {LEAST_WORDS} or more",
            hint="torch.zeros(3000 * 128, dtype=torch.uint64) on the CPU; of GPUs use torch.profiler",
        )
    return buffer.view(torch.int64).view(-1)


class StepTrace:
    """Notes the steps of a program in a buffer, as one worker."""

    def __init__(self, buffer: Tensor) -> None:
        self._words, self._step = buffer, 0
        self._words[0], self._words[1] = 1, 0
        self._note(0)

    def did_step(self) -> None:
        self._note(PHASES.index("step"))
        self._step += 1

    def _note(self, phase: int) -> None:
        place = 2 + 2 * int(self._words[1])
        if place + 2 <= len(self._words):
            self._words[place], self._words[place + 1] = self._step << 16 | phase, time.perf_counter_ns()
            self._words[1] += 1


def spans(buffer: Tensor) -> Iterator[Span]:
    """What the last call noted, worker by worker, in order."""
    words = buffer.view(torch.int64).view(-1)
    workers = int(words[0])
    share = (len(words) - 1) // workers if workers else 0
    for worker in range(workers):
        own = words[1 + worker * share : 1 + (worker + 1) * share].tolist()
        ended = 0
        for place in range(1, 1 + 2 * own[0], 2):
            what, now = own[place], own[place + 1]
            if what & 255:
                yield Span(worker, what >> 16, what >> 8 & 255, PHASES[what & 255], ended, now)
            ended = now


def save_trace(buffer: Tensor, path: str | Path) -> int:
    """Write the spans as Chrome's JSON, which Perfetto opens too; gives their number."""
    found = list(spans(buffer))
    begun = min((span.begin_ns for span in found), default=0)
    events = [
        {
            "name": span.phase,
            "ph": "X",
            "pid": 0,
            "tid": span.worker,
            "ts": (span.begin_ns - begun) / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "args": {"step": span.step, "layer": span.layer},
        }
        for span in found
    ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}), encoding="utf-8")
    return len(events)
