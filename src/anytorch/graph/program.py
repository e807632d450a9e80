"""A partition that runs: every group by a compiled kernel or by torch, on tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from anytorch.graph import reference
from anytorch.graph.back.cpp import Launch
from anytorch.graph.handwritten import ByHand, ready_for
from anytorch.graph.loops import Kernel
from anytorch.graph.partition import Group, Partition, shown, sources
from anytorch.graph.sizes import shape_at

# The named sizes, what every step makes, and kernels by hand that were made for other sizes, made anew for these.
_Plan = tuple[dict[str, int], list[list[tuple[int, tuple[int, ...], torch.dtype]]], dict[int, ByHand]]


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


class Program:
    def __init__(self, partition: Partition, steps: Sequence[Step]) -> None:
        self.partition, self.steps = partition, tuple(steps)
        self._plans: dict[tuple[torch.Size, ...], _Plan] = {}
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
        """The graph's outputs. With `poison` results are filled with NaN first, so that an element nobody writes shows."""
        graph = self.partition.graph
        key = tuple([tensor.shape for tensor in tensors])
        plan = self._plans.get(key)
        device = tensors[0].device if tensors else torch.device("cpu")
        if plan is None:
            plan = self._plans[key] = self._planned(reference.sizes_of(graph, tensors), device)
        known, made_of, by_hand = plan
        values = {number: tensor.contiguous() for number, tensor in zip(graph.inputs, tensors, strict=True)}
        for step, made, drops in zip(self.steps, made_of, self._drops, strict=True):
            if not step.ours:
                (number,) = step.group.outputs
                node = graph.nodes[number]
                args = [self._view(arg, values, known, device) for arg in node.args]
                dtype = reference.dtype_named(node.dtype)
                values[number] = reference.compute(node, args, known, dtype, device).contiguous()
            else:
                for number, shape, dtype in made:
                    values[number] = torch.empty(shape, dtype=dtype, device=device)
                    if poison:
                        values[number].fill_(torch.nan if dtype.is_floating_point else 113)
                if step.launch is not None and step.kernel is not None:
                    step.launch([values[buffer.node] for buffer in step.kernel.buffers], known)
                elif step.by_hand is not None:
                    (number,) = step.group.outputs
                    args = [self._view(arg, values, known, device) for arg in graph.nodes[number].args]
                    by_hand.get(number, step.by_hand)(args, values[number])
            for number in drops:
                values.pop(number, None)
        return [self._view(number, values, known, device) for number in graph.outputs]

    def _planned(self, known: dict[str, int], device: torch.device) -> _Plan:
        """What does not change between calls of the same sizes: the sizes, every step's results, and kernels by hand, which
        are made for sizes. Raises GraphError if one of those does not take these."""
        graph = self.partition.graph
        made = []
        anew: dict[int, ByHand] = {}
        for step in self.steps:
            nodes = [(number, graph.nodes[number]) for number in step.group.outputs]
            made.append([(n, shape_at(node.shape, known), reference.dtype_named(node.dtype)) for n, node in nodes])
            if step.by_hand is not None and dict(step.by_hand.known) != known:
                (number,) = step.group.outputs
                anew[number] = ready_for(graph.nodes[number], known, step.by_hand.kernel.back, device)
        return known, made, anew

    def _view(
        self, number: int, values: Mapping[int, torch.Tensor], known: Mapping[str, int], device: torch.device
    ) -> torch.Tensor:
        """A node that is in memory, or a view, constant or row of positions made from such nodes."""
        if number in values:
            return values[number]
        graph = self.partition.graph
        node = graph.nodes[number]
        args = [self._view(arg, values, known, device) for arg in node.args]
        return reference.compute(node, args, known, reference.dtype_named(node.dtype), device)
