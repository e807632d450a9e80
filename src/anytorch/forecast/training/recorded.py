"""Record a training step once and replay it, for devices where launching the kernels takes longer than running them.

The step reads its windows from the same memory every time, its learning rate from a tensor, and its dice from a generator
that was seeded for the step; nothing of it looks at the host. Before the first step of a process it is rehearsed on that
step's windows: plainly a few times, as libraries choose their kernels then, and recorded; what that changed is put back.
Only if both ways arrive at the same weights, with other dice than it was recorded with, is the recording used, and then for
every step: a run that was killed and goes on computes all of them the same way as one that was not, to the last bit. A step
that cannot be recorded runs plainly, always, and the log says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anytorch import logs
from anytorch.errors import WrongAnswer
from anytorch.recorded.graphs import graph_class, others_left_alone, side_stream

log = logs.logger(__name__)
Answer = tuple[Tensor, dict[str, Tensor]]
Work = Callable[[Tensor, Tensor], Answer]

REHEARSALS = 3
OTHER_DICE = 1  # seed of what is compared: a recording whose random numbers repeat is found out
# Of the length of a step: sums in another order may turn the sign of a gradient that is next to nothing.
SAME_STEP = 0.05


class RecordedStep:
    """Calls `work(values, stamps)` by replaying what it did on the device when it was rehearsed."""

    def __init__(
        self,
        work: Work,
        device: torch.device,
        forget_gradients: Callable[[], None],
        begin: Callable[[], None],
        weights: Sequence[Tensor],
        state: Callable[[], list[Tensor]],
    ) -> None:
        """`begin` seeds the random numbers of a step; `state` is what a step changes besides the weights."""
        self.work, self.device, self.forget_gradients = work, device, forget_gradients
        self.begin, self.weights, self.state = begin, list(weights), state
        self.module: Any = torch.get_device_module(device)
        self.streams = callable(getattr(self.module, "graph", None))  # a device that records on one of several streams
        self.failed = ""
        self.inputs: tuple[Tensor, Tensor] | None = None
        self.graph: Any = None
        self.answer: Answer | None = None

    def __call__(self, values: Tensor, stamps: Tensor) -> Answer:
        """`values` and `stamps` may be on the host; their shapes are always the same."""
        if self.failed:
            return self._plainly(values.to(self.device), stamps.to(self.device))
        if self.inputs is None:
            self.inputs = (values.to(self.device).clone(), stamps.to(self.device).clone())
        for kept, given in zip(self.inputs, (values, stamps), strict=True):
            kept.copy_(given, non_blocking=True)
        if self.graph is None:
            self._rehearse(*self.inputs)
        return self._plainly(*self.inputs) if self.graph is None else self._replay()

    def _replay(self) -> Answer:
        self.graph.replay()
        assert self.answer is not None
        loss, parts = self.answer
        return loss.clone(), {name: part.clone() for name, part in parts.items()}

    @torch.no_grad()
    def _rehearse(self, values: Tensor, stamps: Tensor) -> None:
        """Take the step plainly and as a recording, each from the same weights; keep the recording if it does the same."""
        before, before_state = copies(self.weights), copies(self.state())
        for _ in range(REHEARSALS):
            self._put_back(before, before_state)
            torch.manual_seed(OTHER_DICE)
            with torch.enable_grad():
                self._plainly(values, stamps)
        after = copies(self.weights)
        try:
            self._put_back(before, before_state)
            self.begin()
            with torch.enable_grad():
                self._record(values, stamps)
            self._put_back(before, before_state)  # some devices compute what they record
            torch.manual_seed(OTHER_DICE)
            self._replay()
            apart, length = distance(self.weights, after), distance(before, after)
            if not apart <= SAME_STEP * length:
                raise WrongAnswer(f"its step ends {apart / max(length, 1e-30):.2g} of its length away")
        except (RuntimeError, TypeError, AttributeError, ValueError, WrongAnswer) as exc:  # also where memory is short
            self.failed = f"{type(exc).__name__}: {str(exc).splitlines()[0][:200]}"
            log.info("%s: training steps are not recorded: %s", self.device, self.failed)
            self.graph = self.answer = None
            self.forget_gradients()
        self._put_back(before, before_state)
        self.begin()

    def _put_back(self, weights: list[Tensor], state: list[Tensor]) -> None:
        restore(self.weights, weights)
        if state:
            restore(self.state(), state)
        else:  # it came into being with the first rehearsal; an optimizer begins with zeros
            for part in self.state():
                part.zero_()

    def _plainly(self, values: Tensor, stamps: Tensor) -> Answer:
        if self.failed or not self.streams:
            answer = self.work(values, stamps)
        else:
            # Beside the main stream, as what is recorded later: gradients are then summed where they are recorded.
            stream = side_stream(self.module, self.device)
            stream.wait_stream(self.module.current_stream())
            with self.module.stream(stream):
                answer = self.work(values, stamps)
            self.module.current_stream().wait_stream(stream)
        self.forget_gradients()
        return answer

    def _record(self, values: Tensor, stamps: Tensor) -> None:
        kind = graph_class(self.module)
        if kind is None:
            raise AttributeError(f"{self.module.__name__} has no graph to record into")
        self.forget_gradients()  # those of the recording are its own
        graph = kind()
        # Where the module has no such function, `with graph:` records by itself.
        recording = graph
        if self.streams:
            stream, others = side_stream(self.module, self.device), others_left_alone(self.module.graph)
            recording = self.module.graph(graph, stream=stream, **others)
        with recording:
            self.answer = self.work(values, stamps)
        self.graph = graph


def copies(parts: list[Tensor]) -> list[Tensor]:
    return [part.clone() for part in parts]


def restore(state: list[Tensor], kept: list[Tensor]) -> None:
    for part, value in zip(state, kept, strict=True):
        part.copy_(value)


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return math.sqrt(sum(float((a - b).norm()) ** 2 for a, b in zip(one, other, strict=True)))
