"""Fuses elementwise ops with the reductions over the last dimensions that they feed and that feed them.

`x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight` is one kernel. Ops with a kernel of their own (softmax,
layer norm) stay what they are; this is for what people write by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod

import torch
from torch.fx import GraphModule, Node

from anytorch.gpu.launch import grid
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.fused_rows import FusedRows, Phase, render
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.dtypes import FLOATS, computable, name_of
from anytorch.webgpu.folds import has_subgroups
from anytorch.webgpu.fusion import FusedKernel, Group, fuse_groups, is_fusable, node_statement
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
        module, more = fuse_groups(
            module,
            f"rows_{k}_",
            partial(is_of_form, form),
            partial(compile_rows, form),
            lambda node, form=form: reduced_form(node) == form,
        )
        made += more
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


def is_of_form(form: Form, node: Node) -> bool:
    """Does this node reduce such rows, give every element of a row the row's value, or compute with either?"""
    shape, reduced = form
    row = (*shape[: len(shape) - reduced], *[1] * reduced)
    if reduced_form(node) == form:
        return True
    if node.op == "call_function" and node.target is aten.expand.default and isinstance(node.args[0], Node):
        source, value = node.args[0].meta.get("val"), node.meta.get("val")
        tensors = isinstance(source, torch.Tensor) and isinstance(value, torch.Tensor) and source.dtype in FLOATS
        return tensors and tuple(source.shape) == row and tuple(value.shape) == shape
    return is_fusable(node) and tuple(node.meta["val"].shape) in (shape, row)


def compile_rows(form: Form, module: GraphModule) -> FusedKernel | None:
    """A group of nodes as a kernel; None if it needs more buffers, parameters or word types than there are."""
    group, chain = Group(module), _Chain(*form)
    for node in group.inputs:
        chain.take(node)
    if not all(map(chain.add, group.body)):
        return None
    kernel = chain.kernel(group.results)
    if kernel is None:
        return None
    groups = grid(kernel.rows if kernel.group else -(-kernel.rows // kernel.threads))
    order = sorted(range(len(group.results)), key=lambda k: chain.rowwise[group.results[k].name])
    return group.launched(kernel, render, groups, order=order)  # elements are bound first


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
