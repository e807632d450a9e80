"""`torch.compile(model, backend="anytorch")`: on the webgpu device, chains of elementwise ops, and the reductions over
the last dimensions among them, become single kernels.

Graphs on other devices become kernel graphs (`anytorch.graph.compiler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd

from anytorch import logs
from anytorch.graph import compiler as kernel_graphs
from anytorch.webgpu.fusion import fuse, fuse_rows
from anytorch.webgpu.kernels import RULES, has_kernel
from anytorch.webgpu.tensors import NAME, aten

log = logs.logger(__name__)
statistics = {"graphs": 0, "kernels": 0}


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The back end torch.compile calls."""
    if not any(isinstance(value, torch.Tensor) and value.device.type == NAME for value in inputs):
        return kernel_graphs.compile_graph(module, inputs)
    compiler = aot_autograd(fw_compiler=fused, decompositions=decompositions())
    return compiler(module, list(inputs))


def fused(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    made, over_rows = fuse_rows(simplified(module))  # first: what it leaves, the elementwise pass may still take
    made, kernels = fuse(made)
    kernels += over_rows
    statistics["graphs"] += 1
    statistics["kernels"] += kernels
    log.debug("a graph of %d nodes: %d fused kernels", len(list(made.graph.nodes)), kernels)
    return make_boxed_func(made.forward)


# The gradients of autograd use overloads that take a number; those that take a tensor take one as well, and have rules.
OF_TENSORS = {getattr(aten, name).Scalar: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")}


def simplified(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Without aliases, which mean nothing in a graph that changes no tensor, and with fewer kinds of ops."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        elif node.target in OF_TENSORS:
            node.target = OF_TENSORS[node.target]
    module.recompile()
    return module


def decompositions() -> dict[Any, Any]:
    """torch's own, except for ops that have a kernel of ours: a fused softmax beats its five parts."""
    return {op: rule for op, rule in core_aten_decompositions().items() if op not in RULES and not has_kernel(op)}
