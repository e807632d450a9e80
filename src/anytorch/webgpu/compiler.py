"""`torch.compile(model, backend="anytorch")`: on the webgpu device, what kernel graphs can express becomes kernels.

The regions, and the search that decides whether our kernels or ATen's compute one, are `graph.compiler`'s; this module says
which nodes a region may have here, and which ops are taken apart before. `graph.compiler.compile_graph` finds it as
`torch.webgpu.compile_graph`: that name must not import this package, which would make webgpu torch's accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Node

from anytorch.gpu.runtime import open_runtime
from anytorch.graph import compiler as kernel_graphs
from anytorch.graph.calls import cheaper
from anytorch.graph.faster import Faster
from anytorch.graph.in_place import IN_PLACE
from anytorch.graph.tracing import RULES as FORMS
from anytorch.graph.tracing import SEVERAL, is_traceable
from anytorch.webgpu.dtypes import usable
from anytorch.webgpu.kernels import RULES, has_kernel
from anytorch.webgpu.tensors import NAME

LEAST_OPS = 2  # of a region that are no views: a single op has a kernel of its own


def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """A module whose inputs are on this device, compiled, or as it was where that is faster.

    While a tape records, ours is taken: kernels were chosen by the GPU's time, and a replay has no other.
    """
    compiler = aot_autograd(fw_compiler=regions, decompositions=decompositions(), keep_inference_input_mutations=True)
    return Faster(module.forward, compiler(module, list(inputs)), records=_is_recording)


def _is_recording() -> bool:
    return open_runtime().recorder is not None


def regions(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """The module with our kernels in place of what they compute."""
    return kernel_graphs.with_regions(
        module, inputs, supports=is_supported, least=LEAST_OPS, joins=True, settle=with_any_strides
    )


def with_any_strides(module: torch.fx.GraphModule) -> None:
    """Cheaper calls, and views that take any strides, changed in place.

    A kernel of this device may give other strides than its meta function promised when the graph was traced, and a view
    that torch found possible then is not; in a graph that changes no tensor, a reshape means the same.
    """
    cheaper(module)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.Tensor.view:
            node.target = torch.Tensor.reshape
    module.recompile()


def is_supported(node: Node) -> bool:
    """Whether this node can be part of a kernel of ours: it has a form, and this adapter's shaders compute its dtypes."""
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    found = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    tensors = [one for one in found if isinstance(one, torch.Tensor) and one.device.type == NAME]
    dtypes = [one.dtype for one in tensors]
    known = len(tensors) == len(found) and usable(*dtypes) and torch.int8 not in dtypes  # generated WGSL reads no bytes
    return known and is_traceable(node)


def decompositions() -> dict[Any, Any]:
    """torch's own, except for ops that have a form in kernel graphs or a kernel of ours that does more than its elements
    one by one: a layer norm's gradient beats its ten parts, an activation's does not."""
    kept = {*FORMS, *SEVERAL, *IN_PLACE}
    return {
        op: rule
        for op, rule in core_aten_decompositions().items()
        if op not in kept and (op in RULES or not has_kernel(op))
    }
