"""Fuses elementwise ops with the reductions over the last dimensions that they feed and that feed them.

`x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight` is one kernel. Ops with a kernel of their own (softmax,
layer norm) stay what they are; this is for what people write by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from anytorch.gpu.launch import grid
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.elementwise import MOST_WORDS
from anytorch.gpu.wgsl.fused_rows import FusedRows, Phase, render
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.dtypes import FLOATS, computable, name_of
from anytorch.webgpu.folds import has_subgroups
from anytorch.webgpu.fusion import FusedKernel, is_fusable, node_statement
from anytorch.webgpu.tensors import NAME, aten

FOLD = {aten.sum.dim_IntList: "sum", aten.mean.dim: "sum", aten.amax.default: "max", aten.amin.default: "min"}
LONGEST = 1 << 15  # a longer row is better split over several workgroups, which the reduction's own kernels do
FEWEST = 8

Form = tuple[tuple[int, ...], int]  # a shape, and how many of its last dimensions are reduced


def fuse_rows(module: GraphModule) -> tuple[GraphModule, int]:
    """Fuse what can be fused, one form of rows after another; returns the module and the number of kernels made."""
    forms = list(dict.fromkeys(form for node in module.graph.nodes if (form := reduced_form(node)) is not None))
    made = 0
    for k, form in enumerate(forms):
        partitioner = CapabilityBasedPartitioner(module, _OfForm(form), allows_single_node_partition=False)
        partitions = [p for p in partitioner.propose_partitions() if any(reduced_form(n) == form for n in p.nodes)]
        prefix = f"rows_{k}_"
        module = partitioner.fuse_partitions([p for p in partitions if len(p.nodes) > 1], prefix=prefix)
        for node in module.graph.nodes:
            if node.op == "call_module" and node.target.startswith(prefix):
                kernel = compile_rows(getattr(module, node.target), form)
                if kernel is not None:
                    setattr(module, node.target, kernel)
                    made += 1
    module.recompile()
    return module, made


def reduced_form(node: Node) -> Form | None:
    """The shape that this node reduces over its last dimensions; None if it is no such reduction."""
    if node.op != "call_function" or node.target not in FOLD or not isinstance(node.args[0], Node):
        return None
    source, value = node.args[0].meta.get("val"), node.meta.get("val")
    if not (isinstance(source, torch.Tensor) and isinstance(value, torch.Tensor)):
        return None
    if source.device.type != NAME or source.dtype not in FLOATS or value.dtype not in FLOATS:
        return None
    if not computable(source.dtype):
        return None
    if any(not isinstance(length, int) for length in source.shape) or not source.is_contiguous() or node.kwargs:
        return None
    dims = node.args[1] if len(node.args) > 1 else None
    if not dims or not isinstance(dims, (list, tuple)):
        return None
    rank = source.dim()
    found = sorted(int(dim) % rank for dim in dims)
    if found != list(range(rank - len(found), rank)):
        return None
    length = prod(source.shape[rank - len(found) :])
    rows = source.numel() // max(length, 1)
    return (tuple(source.shape), len(found)) if 1 < length <= LONGEST and rows >= FEWEST else None


class _OfForm(OperatorSupportBase):
    def __init__(self, form: Form) -> None:
        self.form = form
        shape, reduced = form
        self.row = (*shape[: len(shape) - reduced], *[1] * reduced)

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        if reduced_form(node) == self.form or self.spreads(node):
            return True
        return is_fusable(node) and tuple(node.meta["val"].shape) in (self.form[0], self.row)

    def spreads(self, node: Node) -> bool:
        """Does this node give every element of a row the row's value?"""
        if node.op != "call_function" or node.target is not aten.expand.default or not isinstance(node.args[0], Node):
            return False
        source, value = node.args[0].meta.get("val"), node.meta.get("val")
        if not (isinstance(source, torch.Tensor) and isinstance(value, torch.Tensor)) or source.dtype not in FLOATS:
            return False
        return tuple(source.shape) == self.row and tuple(value.shape) == self.form[0]


def compile_rows(group: GraphModule, form: Form) -> FusedKernel | None:
    """A group of nodes as a kernel; None if it needs more buffers, parameters or word types than there are."""
    shape, reduced = form
    nodes = list(group.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    (output,) = [n for n in nodes if n.op == "output"]
    returned = output.args[0]
    results: list[Node] = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    chain = _Chain(shape, reduced)
    for node in inputs:
        chain.take(node)
    for node in nodes:
        if node.op == "call_function" and not chain.add(node):
            return None
    kernel = chain.kernel(results)
    if kernel is None:
        return None
    limit = int(open_runtime().limits["max-storage-buffers-per-shader-stage"])
    if kernel.buffers > limit or kernel.words > MOST_WORDS:
        return None
    return FusedKernel(
        kernel,
        render,
        grid(kernel.rows if kernel.group else -(-kernel.rows // kernel.threads)),
        (),
        [n.meta["val"] for n in inputs],
        [n.meta["val"] for n in results],
        sorted(range(len(results)), key=lambda k: chain.rowwise[results[k].name]),  # elements are bound first
        kernel.writable,
        single=not isinstance(returned, (list, tuple)),
    )


class _Chain:
    """The nodes of a group sorted by what they are computed for (an element, or a row) and in which phase."""

    def __init__(self, shape: tuple[int, ...], reduced: int) -> None:
        self.shape, self.reduced = shape, reduced
        self.length = prod(shape[len(shape) - reduced :])
        self.inputs: list[tuple[str, tuple[int, ...]]] = []
        self.names: dict[str, str] = {}
        self.rowwise: dict[str, bool] = {}
        self.phase: dict[str, int] = {}
        self.text: dict[str, str] = {}  # statements, in order
        self.sources: dict[str, list[str]] = {}
        self.folds: dict[str, tuple[str, str]] = {}  # node: kind, the node folded

    def take(self, node: Node) -> None:
        value = node.meta["val"]
        strides = tuple(int(s) for s in value.expand(self.shape).stride())
        self.names[node.name] = f"x{len(self.inputs)}"
        self.inputs.append((name_of(value.dtype), strides))
        self.rowwise[node.name] = not any(strides[len(self.shape) - self.reduced :])
        self.phase[node.name] = 0

    def add(self, node: Node) -> bool:
        name = self.names[node.name] = f"v{len(self.text)}"
        sources = [source.name for source in node.all_input_nodes]
        self.sources[node.name] = sources
        after = max(self.phase[source] for source in sources)
        if node.target in FOLD:
            (source,) = sources
            if self.rowwise[source]:
                return False  # an input that only looks like rows: its own kernel does it better
            self.folds[node.name] = (FOLD[node.target], source)
            divided = f" / f32({self.length}.0)" if node.target is aten.mean.dim else ""
            self.text[node.name] = f"let {name} = s.{name}{divided};"
            self.rowwise[node.name], self.phase[node.name] = True, after + 1
            return True
        if node.target is aten.expand.default:
            text = f"<{sources[0]}>"
        else:
            written = node_statement(node)
            if written is None:
                return False
            text = written[0]
        for source in sources:
            text = text.replace(f"<{source}>", self.names[source])
        self.text[node.name] = f"let {name} = {text};"
        # A broadcast of rows to elements is an element's affair; anything of the rows' own shape is a row's.
        self.rowwise[node.name] = all(self.rowwise[s] for s in sources) and tuple(node.meta["val"].shape) != self.shape
        self.phase[node.name] = after
        return True

    def kernel(self, results: Sequence[Node]) -> FusedRows | None:
        if not self.folds:
            return None
        outputs, row_outputs = [], []
        for node in results:
            dtype = name_of(node.meta["val"].dtype)
            if self.rowwise[node.name]:
                if KINDS[dtype].lanes > 1:
                    return None  # neighbouring rows would share a word
                row_outputs.append((dtype, self.names[node.name]))
            else:
                outputs.append((dtype, self.names[node.name]))
        if any(self.length % KINDS[dtype].lanes for dtype, _ in outputs):
            return None
        last = max(self.phase[name] for name in self.folds)
        phases = []
        for p in range(last):
            folded = {name: fold for name, fold in self.folds.items() if self.phase[name] == p + 1}
            phases.append(
                Phase(
                    tuple(self._towards([source for _, source in folded.values()])),
                    tuple((self.names[n], kind, self.names[source]) for n, (kind, source) in folded.items()),
                    tuple(self._of_rows(p + 1)),
                )
            )
        runtime = open_runtime()
        group = not runtime.adapter.software and self.length > 32
        return FusedRows(
            self.shape,
            self.reduced,
            tuple(self.inputs),
            tuple(self._of_rows(0)),
            tuple(phases),
            tuple(self._towards([n.name for n in results if not self.rowwise[n.name]])),
            tuple(outputs),
            tuple(row_outputs),
            group=group,
            threads=256 if group and self.length > 1024 else 64,
            subgroups=group and has_subgroups(runtime),
        )

    def _of_rows(self, phase: int) -> Iterator[str]:
        return (text for name, text in self.text.items() if self.rowwise[name] and self.phase[name] == phase)

    def _towards(self, wanted: Sequence[str]) -> list[str]:
        """The statements per element that the wanted values need, in order."""
        found: set[str] = set()
        queue = list(wanted)
        while queue:
            name = queue.pop()
            if name in found or name not in self.text or self.rowwise[name]:
                continue
            found.add(name)
            queue += self.sources[name]
        return [text for name, text in self.text.items() if name in found]
