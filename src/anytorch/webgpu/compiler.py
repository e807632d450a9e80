"""`torch.compile(model, backend="anytorch")`: on the webgpu device, chains of elementwise ops become single kernels.

Graphs on other devices go to torch's own default compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd

from anytorch import logs
from anytorch.webgpu.fusion import fuse
from anytorch.webgpu.kernels import RULES
from anytorch.webgpu.tensors import NAME

log = logs.logger(__name__)
statistics = {"graphs": 0, "kernels": 0}


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """The back end torch.compile calls."""
    if not any(isinstance(value, torch.Tensor) and value.device.type == NAME for value in inputs):
        from torch._dynamo import lookup_backend

        return lookup_backend("inductor")(module, list(inputs))
    compiler = aot_autograd(fw_compiler=fused, decompositions=decompositions())
    return compiler(module, list(inputs))


def fused(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    made, kernels = fuse(module)
    statistics["graphs"] += 1
    statistics["kernels"] += kernels
    log.debug("a graph of %d nodes: %d fused kernels", len(list(made.graph.nodes)), kernels)
    return make_boxed_func(made.forward)


def decompositions() -> dict[Any, Any]:
    """torch's own, except for ops that have a kernel of ours: a fused softmax beats its five parts."""
    return {op: rule for op, rule in core_aten_decompositions().items() if op not in RULES and not has_kernel(op)}


def has_kernel(op: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "PrivateUse1"))
