"""A partition that runs: every group by a compiled kernel or by torch, on tensors in, tensors out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.graph import reference
from anytorch.graph.back.cpp import Launch
from anytorch.graph.handwritten import ByHand, ready_for
from anytorch.graph.ir import Graph
from anytorch.graph.loops import Kernel
from anytorch.graph.partition import Group, Partition, partition, shown, sources
from anytorch.graph.sizes import shape_at

MOST_PLANS = 1024  # kinds of inputs that a program remembers its plan for
Values = dict[int, torch.Tensor]
Read = Callable[[Values], torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One group of a program: a kernel that is launched, generated or written by hand, or (None) a node for torch."""

    group: Group
    kernel: Kernel | None = None
    launch: Launch | None = None
    schedule: str = ""
    text: str = ""
    by_hand: ByHand | None = None

    @property
    def ours(self) -> bool:
        return self.kernel is not None or self.by_hand is not None


Turn = Callable[[Values, bool], None]


@dataclass(frozen=True)
class _Plan:
    """A program for inputs of certain sizes on a device."""

    inputs: tuple[int, ...]
    turns: Sequence[Turn]
    outputs: Sequence[Read]


class Program:
    def __init__(self, partition: Partition, steps: Sequence[Step]) -> None:
        self.partition, self.steps = partition, tuple(steps)
        self._dense = any(step.ours for step in self.steps)  # torch's own ops take tensors as they lie in memory
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        graph = partition.graph
        # After which step a stored node is needed no more.
        self._last: dict[int, int] = {}
        for place, step in enumerate(self.steps):
            for number in self._reads(step):
                self._last[number] = place
        kept = {shown(graph, one) for one in graph.outputs}
        self._drops: list[list[int]] = [[] for _ in self.steps]
        for number, place in self._last.items():
            if number not in kept:
                self._drops[place].append(number)

    def _reads(self, step: Step) -> set[int]:
        if step.kernel is not None:
            return {buffer.node for buffer in step.kernel.buffers}
        return sources(self.partition.graph, step.group.outputs[0])

    def __call__(self, tensors: Sequence[torch.Tensor], *, poison: bool = False) -> list[torch.Tensor]:
        """The graph's outputs. With `poison` results are filled with NaN first, so that an unwritten element shows."""
        device = tensors[0].device if tensors else torch.device("cpu")
        key = (device, *[tensor.shape for tensor in tensors])
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            known = reference.sizes_of(self.partition.graph, tensors)
            # What it keeps is used by calls with and without gradients alike.
            with torch.inference_mode(False), torch.no_grad():
                plan = self._plans[key] = self._planned(known, device)
        values = dict(zip(plan.inputs, tensors, strict=True))
        if self._dense:
            values = {number: tensor.contiguous() for number, tensor in values.items()}
        for turn, drops in zip(plan.turns, self._drops, strict=True):
            turn(values, poison)
            for number in drops:
                values.pop(number, None)
        return [read(values) for read in plan.outputs]

    def _planned(self, known: dict[str, int], device: torch.device) -> _Plan:
        """What does not change between calls with these sizes. Raises GraphError if a kernel by hand does not take them."""
        graph = self.partition.graph
        stored = set(graph.inputs)
        turns = []
        for step in self.steps:
            turns.append(self._turn(step, stored, known, device))
            stored.update(step.group.outputs)
        return _Plan(
            tuple(graph.inputs), turns, [self._reader(one, stored, known, device, True) for one in graph.outputs]
        )

    def _turn(self, step: Step, stored: Set[int], known: dict[str, int], device: torch.device) -> Turn:
        """One step for these sizes: it takes what was computed so far, and adds to it."""
        graph = self.partition.graph
        made = [
            (number, shape_at(graph.nodes[number].shape, known), reference.dtype_named(graph.nodes[number].dtype))
            for number in step.group.outputs
        ]
        number, node = step.group.outputs[0], graph.nodes[step.group.outputs[0]]

        def room(values: Values, poison: bool) -> None:
            for one, shape, dtype in made:
                values[one] = torch.empty(shape, dtype=dtype, device=device)
                if poison:
                    values[one].fill_(torch.nan if dtype.is_floating_point else 113)

        if step.launch is not None and step.kernel is not None:
            launch, buffers = step.launch, [buffer.node for buffer in step.kernel.buffers]

            def launched(values: Values, poison: bool) -> None:
                room(values, poison)
                launch([values[one] for one in buffers], known)

            return launched
        reads = [self._reader(arg, stored, known, device) for arg in node.args]
        if step.by_hand is not None:
            same = dict(step.by_hand.known) == known  # kernels by hand are made for sizes
            by_hand = step.by_hand if same else ready_for(node, known, step.by_hand.kernel.back, device)

            def written(values: Values, poison: bool) -> None:
                room(values, poison)
                by_hand([read(values) for read in reads], values[number])

            return written
        compute = reference.prepared(node, known, reference.dtype_named(node.dtype), device)

        def by_torch(values: Values, poison: bool) -> None:
            values[number] = compute(*[read(values) for read in reads])

        def dense_by_torch(values: Values, poison: bool) -> None:
            values[number] = compute(*[read(values) for read in reads]).contiguous()

        return dense_by_torch if self._dense else by_torch

    def _reader(
        self, number: int, stored: Set[int], known: dict[str, int], device: torch.device, given_away: bool = False
    ) -> Read:
        """How to read a node that is in memory, or a view, constant or row of positions made from such nodes.

        What is made from nothing is made once, unless it is `given_away`: whoever gets it may write to it.
        """
        if number in stored:
            return operator.itemgetter(number)
        node = self.partition.graph.nodes[number]
        compute = reference.prepared(node, known, reference.dtype_named(node.dtype), device)
        reads = [self._reader(arg, stored, known, device, given_away) for arg in node.args]
        if not reads and not given_away:
            value = compute()
            return lambda values: value
        if len(reads) == 1:
            (only,) = reads
            return lambda values: compute(only(values))
        return lambda values: compute(*[read(values) for read in reads])


def all_by_torch(graph: Graph) -> Program:
    """The graph op by op through torch, for any sizes: as `reference.evaluate`, for repeated calls."""
    cut = partition(graph, {}, range(len(graph.nodes)))
    return Program(cut, [Step(group) for group in cut.groups])
