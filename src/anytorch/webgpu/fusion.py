"""Turns a graph of torch ops into the same graph with groups of elementwise ops, and of those with the reductions over the
last dimensions that they feed and that feed them, replaced by single kernels.

`x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight` is one kernel. Ops with a kernel of their own (softmax,
layer norm) stay what they are; this is for what people write by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import functions, fused, fused_rows
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP
from anytorch.gpu.wgsl.fused import Fused
from anytorch.gpu.wgsl.fused_rows import FusedRows, Phase
from anytorch.gpu.wgsl.types import KINDS, convert
from anytorch.webgpu.copies import on_layout
from anytorch.webgpu.dtypes import FLOATS, computable, name_of
from anytorch.webgpu.folds import has_subgroups
from anytorch.webgpu.kernels import RULES, is_operand
from anytorch.webgpu.launch import result_of
from anytorch.webgpu.pointwise import compute_dtype, number, put_in
from anytorch.webgpu.tensors import NAME, aten, sized_tensor

FOLD = {aten.sum.dim_IntList: "sum", aten.mean.dim: "sum", aten.amax.default: "max", aten.amin.default: "min"}
LONGEST = 1 << 15  # a longer row is better split over several workgroups, which the reduction's own kernels do
FEWEST = 8

Form = tuple[tuple[int, ...], int]  # a shape, and how many of its last dimensions are reduced


def fuse(module: GraphModule) -> tuple[GraphModule, int]:
    """Fuse elementwise ops, one shape after another; returns the module and the number of kernels made."""
    shapes = dict.fromkeys(tuple(n.meta["val"].shape) for n in module.graph.nodes if is_fusable(n))

    def supported(shape: tuple[int, ...], node: Node) -> bool:
        return is_fusable(node) and tuple(node.meta["val"].shape) == shape

    return _fuse_groups(module, "fused", list(shapes), supported, compile_group, supported)


def fuse_rows(module: GraphModule) -> tuple[GraphModule, int]:
    """The same for reductions and what is about them, one form of rows after another."""
    forms = dict.fromkeys(form for node in module.graph.nodes if (form := reduced_form(node)) is not None)

    def wanted(form: Form, node: Node) -> bool:
        return reduced_form(node) == form

    return _fuse_groups(module, "rows", list(forms), is_of_form, compile_rows, wanted)


def _fuse_groups(
    module: GraphModule,
    name: str,
    kinds: Sequence[Any],
    supported: Callable[[Any, Node], bool],
    compiled: Callable[[Any, GraphModule], FusedKernel | None],
    wanted: Callable[[Any, Node], bool],
) -> tuple[GraphModule, int]:
    """Put a kernel in the place of every group of nodes supported for a kind that has a wanted one."""
    made = 0
    for k, kind in enumerate(kinds):
        support = create_op_support(lambda submodules, node, kind=kind: supported(kind, node))  # type: ignore[misc]
        partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=False)
        found = [p for p in partitioner.propose_partitions() if len(p.nodes) > 1]
        partitions = [p for p in found if any(wanted(kind, node) for node in p.nodes)]
        prefix = f"{name}_{k}_"
        module = partitioner.fuse_partitions(partitions, prefix=prefix)
        for node in module.graph.nodes:
            if node.op == "call_module" and node.target.startswith(prefix):
                kernel = compiled(kind, getattr(module, node.target))
                if kernel is not None:
                    setattr(module, node.target, kernel)
                    made += 1
    module.recompile()
    return module, made


def is_fusable(node: Node) -> bool:
    """An elementwise op of ours with a plain result: static shape, contiguous, in dtypes this adapter computes with."""
    if node.op != "call_function" or node.target not in RULES:
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != NAME or not value.numel():
        return False
    if any(not isinstance(length, int) for length in value.shape) or not value.is_contiguous():
        return False
    operands = [argument.meta.get("val") for argument in node.all_input_nodes]
    tensors = [v for v in operands if isinstance(v, torch.Tensor)]
    if len(tensors) != len(operands) or any(t.device.type != NAME for t in tensors):
        return False
    return computable(*[t.dtype for t in (value, *tensors)]) and node_statement(node) is not None


def node_statement(node: Node) -> tuple[str, str] | None:
    """The value of a node as WGSL, with {name} for each input node, and its dtype. None if it cannot be written."""
    op: Any = node.target
    rule = RULES[op]
    arguments = op._schema.arguments
    values: list[Any] = [
        *node.args,
        *[a.default_value if a.has_default_value() else None for a in arguments[len(node.args) :]],
    ]
    names = [a.name for a in arguments]
    for name, value in node.kwargs.items():
        values[names.index(name)] = value
    operands = [values[i] for i, a in enumerate(arguments) if is_operand(a)]
    modes = [values[i] for i, a in enumerate(arguments) if not is_operand(a)]
    known: list[Any] = [v.meta["val"] if isinstance(v, Node) else v for v in operands]
    if any(v is None or not isinstance(v, (torch.Tensor, bool, int, float)) for v in known):
        return None
    result: torch.dtype = node.meta["val"].dtype
    compute = name_of(compute_dtype(rule, known, result))
    kind = KINDS[compute].compute if compute in KINDS else ""
    if kind not in ("f32", "i32") and not (kind == "i64" and "shader-int64" in open_runtime().features):
        return None
    expression = rule.expression if isinstance(rule.expression, str) else rule.expression(*modes)
    texts = []
    for value, fact in zip(operands, known, strict=True):
        if isinstance(value, Node):
            texts.append(f"({convert(f'<{value.name}>', name_of(fact.dtype), compute)})")
        else:
            if kind != "f32" and not -(2**31) < int(fact) < 2**31:
                return None
            texts.append(number(fact) if kind == "f32" else f"{kind}({int(fact)})")
    text = put_in(expression, texts, compute, name_of(result))
    return (text, name_of(result)) if functions.computable(text, kind) else None


class Group:
    """The nodes of a group: what it is given, what it computes, and what it returns."""

    def __init__(self, module: GraphModule) -> None:
        nodes = list(module.graph.nodes)
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        self.body = [n for n in nodes if n.op == "call_function"]
        (output,) = [n for n in nodes if n.op == "output"]
        returned = output.args[0]
        self.single = not isinstance(returned, (list, tuple))
        self.results: list[Node] = [returned] if self.single else list(returned)

    def launched(
        self,
        kernel: Fused | FusedRows,
        render: Callable[[Any], str],
        groups: tuple[int, int],
        head: tuple[int, ...] = (),
        order: Sequence[int] | None = None,
    ) -> FusedKernel | None:
        """The kernel as a module; None if it needs more buffers or parameters than there are. See FusedKernel."""
        limit = int(open_runtime().limits["max-storage-buffers-per-shader-stage"])
        if kernel.buffers > limit or kernel.words > MOST_WORDS:
            return None
        inputs, results = ([n.meta["val"] for n in nodes] for nodes in (self.inputs, self.results))
        return FusedKernel(kernel, render, groups, head, inputs, results, order or range(len(results)), self.single)


def compile_group(shape: tuple[int, ...], module: GraphModule) -> FusedKernel | None:
    """A group of nodes of one shape as a kernel."""
    group = Group(module)
    names = {n.name: f"x{i}" for i, n in enumerate(group.inputs)}
    statements = []
    for k, node in enumerate(group.body):
        written = node_statement(node)
        if written is None:
            return None
        text = written[0]
        for source in node.all_input_nodes:
            text = text.replace(f"<{source.name}>", names[source.name])
        names[node.name] = f"v{k}"
        statements.append(f"let v{k} = {text};")
    kernel = Fused(
        shape=shape,
        inputs=tuple(
            (name_of(n.meta["val"].dtype), tuple(int(s) for s in n.meta["val"].expand(shape).stride()))
            for n in group.inputs
        ),
        statements=tuple(statements),
        outputs=tuple((name_of(n.meta["val"].dtype), names[n.name]) for n in group.results),
    )
    x, y = grid(-(-kernel.elements // (kernel.per_thread * WORKGROUP)))
    return group.launched(kernel, fused.render, (x, y), (x * WORKGROUP,))


class FusedKernel(torch.nn.Module):
    """A launched group: tensors in, new contiguous tensors out.

    `head` are the parameters before the inputs' places; `order` says in which order the kernel binds the results.
    """

    def __init__(
        self,
        kernel: Fused | FusedRows,
        render: Callable[[Any], str],
        groups: tuple[int, int],
        head: tuple[int, ...],
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        order: Sequence[int],
        single: bool,
    ) -> None:
        super().__init__()
        self.kernel = kernel
        sizes = [tensor.dtype.itemsize for tensor in inputs]
        self._plan = Plan(kernel, render, groups, sizes, kernel.writable, unplaced=len(results), head=head)
        self._strides = [tuple(int(step) for step in tensor.stride()) for tensor in inputs]
        self._results = [result_of(tensor.shape, tensor.dtype) for tensor in results]
        self._order = list(order)
        self._single = single

    def forward(self, *inputs: torch.Tensor) -> Any:
        # A kernel may return other strides than its meta function promised when the graph was traced; ours are written into
        # the shader, so such a tensor is laid out anew.
        tensors = [
            tensor if tensor.stride() == stride else on_layout(tensor, stride)
            for tensor, stride in zip(inputs, self._strides, strict=True)
        ]
        outputs = [sized_tensor(*result) for result in self._results]
        bound = [*tensors, *[outputs[k] for k in self._order]]
        self._plan([tensor.data_ptr() for tensor in bound])
        return outputs[0] if self._single else outputs


# --- rows ----------------------------------------------------------------------------------------------------------------


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
        if not (isinstance(source, torch.Tensor) and isinstance(value, torch.Tensor)) or source.dtype not in FLOATS:
            return False
        return tuple(source.shape) == row and tuple(value.shape) == shape
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
    return group.launched(kernel, fused_rows.render, groups, order=order)  # elements are bound first


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
