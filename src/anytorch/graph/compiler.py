"""`torch.compile(model, backend="anytorch")`: what kernel graphs can express becomes kernels, the rest stays with ATen.

The FX graphs of the forward and the backward pass are cut into regions of ops that have a form here. A region is searched
when it is first called, each distinct one once: layers that are alike share what was found. Where eager torch is faster, the
region runs as it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from anytorch import logs, settings
from anytorch.graph import records, reference, verify
from anytorch.graph.calling import progress
from anytorch.graph.calls import cheaper
from anytorch.graph.clock import unobserved
from anytorch.graph.faster import faster_of
from anytorch.graph.in_place import IN_PLACE, with_changes
from anytorch.graph.ir import Graph, resized
from anytorch.graph.search import Found, Search
from anytorch.graph.sizes import Size, SizeLike, decided, names_of, shape_at
from anytorch.graph.tracer import Untraceable, size_of
from anytorch.graph.tracing import RULES, SEVERAL, is_traceable, traced
from anytorch.graph.unpacked import with_unbinds

log = logs.logger(__name__)

MOST_SIZES = 1024  # kinds of inputs that a region remembers its program for
LEAST_OPS = 2  # of a region that is worth a kernel
# Times the setting `measure_s`: what the search of one region may take, that of all a model's, and what is no time for one.
SEARCH, WHOLE, LEAST = 10, 20, 0.3
SAID_AFTER_S = 5.0  # of searching for one model: then people are told what they wait for


class Patience:
    """What one model's regions may spend on searching together: the first call of a large model must end, too.

    A region that comes too late runs as it was, and is searched in the next process, which finds the others on disk.
    """

    def __init__(self) -> None:
        self._unit_s = float(settings.get("measure_s"))
        self._left_s = WHOLE * self._unit_s
        self._said = False

    @property
    def region_s(self) -> float:
        """What the next search may take; 0 if there is no time for one."""
        most = min(self._left_s, SEARCH * self._unit_s)
        return most if most >= LEAST * self._unit_s else 0.0

    @contextmanager
    def spent(self) -> Iterator[None]:
        began, used_s = time.perf_counter(), WHOLE * self._unit_s - self._left_s
        if used_s > SAID_AFTER_S and not self._said:
            self._said = True
            words = "torch.compile: kernels of this model are searched, for %.0f s at most; what is found is remembered"
            log.warning(words, self._left_s)
        try:
            yield
        finally:
            self._left_s -= time.perf_counter() - began


def compile_graph(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The back end that torch.compile calls. A device whose module in torch has a `compile_graph` compiles its own."""
    module = with_unbinds(module)
    for kind in {value.device.type for value in inputs if isinstance(value, torch.Tensor)}:
        if (own := getattr(getattr(torch, kind, None), "compile_graph", None)) is not None:
            found: Callable[..., Any] = own(module, inputs)
            return found
    compiler = aot_autograd(
        fw_compiler=partial(with_regions, settle=cheaper, patience=Patience()),
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    return faster_of(module, compiler(module, list(inputs)))


def decompositions() -> dict[Any, Any]:
    """torch's own, except for ops that have a form of their own here, and for attention.

    The one for the CPU's flash attention (torch 2.13) gives wrong gradients of a causal one; the op itself is right.
    """
    every = core_aten_decompositions()
    # An op that changes a part of its input is kept whole: it may be done in place.
    kept = {op: rule for op, rule in dict(every).items() if op not in {*RULES, *SEVERAL, *IN_PLACE}}
    return {op: rule for op, rule in kept.items() if "attention" not in str(op)}


class _Supported(OperatorSupportBase):
    def __init__(self, supports: Callable[[Node], bool]) -> None:
        self._supports = supports

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return self._supports(node)


def with_regions(
    module: GraphModule,
    inputs: Sequence[Any],
    supports: Callable[[Node], bool] = is_traceable,
    least: int = 0,
    joins: bool = False,
    settle: Callable[[GraphModule], object] = GraphModule.recompile,
    patience: Patience | None = None,
) -> Any:
    """The module with regions in place of what they compute: of nodes that a device `supports`, `least` or more of them
    no views. `joins`: as few regions as there can be, for a device where a launch costs more than a kernel. `settle` is
    called with what torch computes: all that is in no region, and regions, which torch may be faster at. `patience`
    is shared by the passes of a model."""
    patience = patience or Patience()
    changing = with_changes(module)
    partitioner = CapabilityBasedPartitioner(module, _Supported(supports), allows_single_node_partition=False)
    proposed = partitioner.propose_partitions()
    if joins:
        proposed = joined(module, proposed)
    partitions = [one for one in proposed if len(one.nodes) >= LEAST_OPS]
    prefix = "anytorch_region_"
    made = partitioner.fuse_partitions(partitions, prefix=prefix)
    count = 0
    for node in made.graph.nodes:
        if node.op == "call_module" and node.target.startswith(prefix):
            inner = getattr(made, node.target)
            try:
                graph = traced(inner)
                # Of nothing but positions and constants there are no sizes and no device to search for.
                if not graph.inputs or sum(one.kind not in ("input", "view") for _, one in graph) < least:
                    continue
                setattr(made, node.target, Region(inner, graph, patience))
                settle(inner)
                count += 1
            except Untraceable as exc:
                log.info("a region is left to ATen: %s", exc)
    settle(made)
    log.debug("a graph of %d nodes: %d regions", len(list(made.graph.nodes)), count)
    return make_boxed_func(changing(made.forward))


def joined(module: GraphModule, partitions: Sequence[Partition]) -> list[Partition]:
    """Regions of which one feeds another made one, where nothing outside lies between them.

    torch's partitioner goes over the nodes once, and leaves apart what a later choice would have let it put together.
    """
    owner: dict[Node, Partition | Node] = {node: node for node in module.graph.nodes}
    for one in partitions:
        owner.update((node, one) for node in one.nodes)

    def following(one: Partition | Node) -> set[Partition | Node]:
        nodes = one.nodes if isinstance(one, Partition) else [one]
        return {owner[user] for node in nodes for user in node.users} - {one}

    def lies_between(first: Partition, second: Partition) -> bool:
        """Whether a path leads from the first, through some other node, into the second."""
        waiting = list(following(first) - {second})
        seen: set[Partition | Node] = set()
        while waiting:
            one = waiting.pop()
            if one is second:
                return True
            if one not in seen:
                seen.add(one)
                waiting += following(one)
        return False

    kept = list(partitions)
    for first in partitions:
        while first in kept:
            second = next(
                (one for one in following(first) if isinstance(one, Partition) and not lies_between(first, one)), None
            )
            if second is None:
                break
            for node in list(second.nodes):
                first.add_node(node)
                owner[node] = first
            kept.remove(second)
    return kept


def _laid_out(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    if tensor.stride() == stride:
        return tensor
    # An element that is seen along a whole dimension (stride 0) is stored once.
    few = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
    laid = torch.empty_strided(few.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(few)
    return laid.expand(tensor.shape)


COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.lift_fresh_copy.default)


def _is_copy_of_an_input(node: Node) -> bool:
    """Whether it is a copied input, maybe seen through views."""
    copied = False
    while isinstance(node, Node) and node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        copied |= node.target in COPIES
        if node.target not in COPIES and not _is_view(node):
            return False
        node = node.args[0]
    return copied and isinstance(node, Node) and node.op == "placeholder"


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.alias_info is not None for argument in schema.arguments)


def with_decided_sizes(graph: Graph) -> tuple[Graph, Callable[[SizeLike], SizeLike]]:
    """The graph with one name for every product of sizes of which its inputs show the product alone, and what gives a size
    its new name. Models flatten batch and length before a product, and what comes after may never meet the two apart."""
    shown = [size for number in graph.inputs for size in graph.nodes[number].shape]
    missing = names_of(shown) - decided(shown)
    products = {names for size in shown if isinstance(size, Size) for names in size.products() if missing & set(names)}

    def change(size: SizeLike) -> SizeLike:
        for names in sorted(products, key=len, reverse=True):
            size = size.joined(names, "_".join(names)) if isinstance(size, Size) else size
        return size

    made = resized(graph, change) if products else graph
    shown = [size for number in made.inputs for size in made.nodes[number].shape]
    used = [
        size
        for _, node in made
        for _, value in node.attrs
        for size in (value if isinstance(value, tuple) else (value,))
    ]
    if (made.sizes | names_of(used)) - decided(shown):
        raise Untraceable("sizes that do not follow from those of the inputs")
    return made, change


_found: dict[tuple[Any, ...], Found] = {}
_lock = threading.Lock()


class Region(torch.nn.Module):
    """Nodes of an FX graph that one kernel graph computes. `plain` is the FX graph itself."""

    def __init__(self, plain: GraphModule, graph: Graph, patience: Patience) -> None:
        super().__init__()
        self.plain, self._patience = plain, patience
        returned = next(node for node in plain.graph.nodes if node.op == "output").args[0]
        self._single = not isinstance(returned, (list, tuple))
        results = [returned] if self._single else returned
        self.kernel_graph, change = with_decided_sizes(graph)
        self._strides = [[change(size_of(step)) for step in one.meta["val"].stride()] for one in results]
        if not {name for steps in self._strides for name in names_of(steps)} <= self.kernel_graph.sizes:
            raise Untraceable("strides that do not follow from the sizes of the inputs")
        self._copied = [_is_copy_of_an_input(one) for one in results]
        self._chosen: dict[tuple[Any, ...], Found] = {}  # by what was called with
        self._by_magnitude: dict[tuple[Any, ...], Found] = {}
        # torch.compile calls a graph without named sizes with one kind of inputs.
        self._is_fixed = not self.kernel_graph.sizes
        self._steps: dict[tuple[Any, ...], list[tuple[int, ...]]] = {}  # the strides of results, likewise

    def forward(self, *inputs: torch.Tensor) -> Any:
        key = () if self._is_fixed else (inputs[0].device, *[tensor.shape for tensor in inputs])
        found = self._chosen.get(key)
        if found is None:
            found = self._found_for(inputs)
            if len(self._chosen) >= MOST_SIZES:
                self._chosen.clear()
            self._chosen[key] = found
        if found.program is None:
            return self.plain(*inputs)
        steps = self._steps.get(key)  # other threads may be here, too: what is missing is made again
        if steps is None:
            known = reference.sizes_of(self.kernel_graph, inputs)
            if len(self._steps) >= MOST_SIZES:
                self._steps.clear()
            steps = self._steps[key] = [shape_at(strides, known) for strides in self._strides]
        # What comes after was compiled, or is written, for the strides that torch's own ops would have given.
        made = [_laid_out(one, stride) for one, stride in zip(found.program(inputs), steps, strict=True)]
        # A graph has no copies: what it returns of an input is that input, which may be written to afterwards.
        made = [one.clone() if copied else one for one, copied in zip(made, self._copied, strict=True)]
        return made[0] if self._single else made

    def _found_for(self, inputs: Sequence[torch.Tensor]) -> Found:
        """A search for these sizes; where sizes have names, one for all of about the same magnitude.

        Kernels take named sizes as arguments. For a size that it was not searched with a program is checked, not timed.
        """
        if any(tensor.device != inputs[0].device for tensor in inputs) or not all(tensor.numel() for tensor in inputs):
            return Found(None, None, why="tensors on several devices, or empty ones")
        known = reference.sizes_of(self.kernel_graph, inputs)
        if not known:
            return self._search(inputs)
        magnitude = (inputs[0].device, *((name, known[name].bit_length() // 2) for name in sorted(known)))
        found = self._by_magnitude.get(magnitude)
        if found is None:
            found = self._by_magnitude[magnitude] = self._search(inputs)
        elif found.program is not None:
            try:
                with torch.no_grad(), unobserved():
                    poisoned = partial(found.program, poison=True)
                    verify.check(self.kernel_graph, known, poisoned, inputs[0].device, ("normal",))
            except Exception as exc:  # noqa: BLE001  (whatever it is, torch computes these sizes)
                log.info("a region runs uncompiled for the sizes %s: %s", known, exc)
                return Found(None, None, why=str(exc))
        return found

    def _eager(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made = self.plain(*inputs)
        return [made] if self._single else list(made)

    def _search(self, inputs: Sequence[torch.Tensor]) -> Found:
        device = inputs[0].device
        known = reference.sizes_of(self.kernel_graph, inputs)
        strides = [tensor.stride() for tensor in inputs]
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def plain(examples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            """The region as it was, on examples that lie in memory as its inputs do: some of its views need that."""
            for one, stride in zip(examples, strides, strict=True):
                if id(one) not in kept:
                    kept[id(one)] = (one, one if 0 in stride else _laid_out(one, stride))
            return self._eager([kept[id(one)][1] for one in examples])

        key = (self.kernel_graph.key, str(device), *sorted(known.items()))
        with _lock, torch.no_grad():
            if key not in _found:
                budget_s = self._patience.region_s
                if not budget_s:
                    return Found(None, None, why="the model's time for searching was used up by other regions")
                with self._patience.spent(), progress(None, budget_s) as tell:
                    search = Search(self.kernel_graph, known, device, budget_s, tell, plain=plain, quick=True)
                    _found[key] = records.searched(search)
            return _found[key]
