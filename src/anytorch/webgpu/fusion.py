"""Turns a graph of torch ops into the same graph with chains of elementwise ops replaced by single kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

from anytorch.gpu.launch import Kernel, Plan, grid
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import functions
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP
from anytorch.gpu.wgsl.fused import Fused, render
from anytorch.gpu.wgsl.fused_rows import FusedRows
from anytorch.gpu.wgsl.types import KINDS, convert
from anytorch.webgpu.copies import on_layout
from anytorch.webgpu.dtypes import computable, name_of
from anytorch.webgpu.kernels import RULES, is_operand
from anytorch.webgpu.launch import result_of
from anytorch.webgpu.pointwise import compute_dtype, number, put_in
from anytorch.webgpu.tensors import NAME, sized_tensor


def fuse(module: GraphModule) -> tuple[GraphModule, int]:
    """Fuse what can be fused, one shape after another; returns the module and the number of kernels made."""
    shapes = list(dict.fromkeys(tuple(n.meta["val"].shape) for n in module.graph.nodes if is_fusable(n)))
    made = 0
    for k, shape in enumerate(shapes):

        def supported(node: Node, shape: tuple[int, ...] = shape) -> bool:
            return is_fusable(node) and tuple(node.meta["val"].shape) == shape

        module, more = fuse_groups(module, f"fused_{k}_", supported, compile_group)
        made += more
    module.recompile()
    return module, made


def fuse_groups(
    module: GraphModule,
    prefix: str,
    supported: Callable[[Node], bool],
    compiled: Callable[[GraphModule], FusedKernel | None],
    wanted: Callable[[Node], bool] = lambda node: True,
) -> tuple[GraphModule, int]:
    """Put a kernel in the place of every group of supported nodes that has a wanted one; how many were made."""
    support = create_op_support(lambda submodules, node: supported(node))
    partitioner = CapabilityBasedPartitioner(module, support, allows_single_node_partition=False)
    partitions = [p for p in partitioner.propose_partitions() if len(p.nodes) > 1 and any(map(wanted, p.nodes))]
    module = partitioner.fuse_partitions(partitions, prefix=prefix)
    made = 0
    for node in module.graph.nodes:
        if node.op == "call_module" and node.target.startswith(prefix):
            kernel = compiled(getattr(module, node.target))
            if kernel is not None:
                setattr(module, node.target, kernel)
                made += 1
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
        render: Callable[[Kernel], str],
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


def compile_group(module: GraphModule) -> FusedKernel | None:
    """A group of nodes of one shape as a kernel."""
    group = Group(module)
    shape = tuple(group.body[0].meta["val"].shape)
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
    return group.launched(kernel, render, (x, y), (x * WORKGROUP,))


class FusedKernel(torch.nn.Module):
    """A launched group: tensors in, new contiguous tensors out.

    `head` are the parameters before the inputs' places; `order` says in which order the kernel binds the results.
    """

    def __init__(
        self,
        kernel: Fused | FusedRows,
        render: Callable[[Kernel], str],
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
