"""Fewer and cheaper calls of torch in an FX graph of ATen ops: the host's time, where nothing of ours computes.

Tracing takes a linear layer apart into four calls and writes each as a call of `torch.ops.aten`, which looks its arguments
up by their schema. Small models on a GPU wait for the host, so what was one cheap call before is one again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default)


def _bound(*names: str) -> dict[Any, Callable[..., Any]]:
    """torch's own functions for all overloads of these ops: they take the same arguments in the same order."""
    found: dict[Any, Callable[..., Any]] = {}
    for name in names:
        packet = getattr(aten, name)
        place = torch._C._VariableFunctions if hasattr(torch._C._VariableFunctions, name) else torch._C._nn
        found.update((getattr(packet, overload), getattr(place, name)) for overload in packet.overloads())
    return {op: function for op, function in found.items() if not op._schema.is_mutable}


CHEAP: Mapping[Any, Callable[..., Any]] = {
    **_bound(
        *(
            "t",
            "permute",
            "transpose",
            "select",
            "squeeze",
            "unsqueeze",
            "clone",
            "cat",
            "mm",
            "bmm",
            "addmm",
            "linear",
        ),
        *("add", "sub", "mul", "div", "neg", "exp", "rsqrt", "pow", "sqrt", "tanh", "sigmoid", "relu", "gelu", "silu"),
        *("mean", "sum", "amax", "native_layer_norm", "convolution", "reshape"),
        *("embedding", "where", "eq", "lt", "gt", "le", "ge"),
    ),
    aten.view.default: torch.Tensor.view,
    aten._unsafe_view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand,
}


def cheaper(module: GraphModule) -> GraphModule:
    """The same module, changed in place: linear layers in one call, views of views in one, and torch's quicker functions."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in VIEWS and _is_view_of_a_view(node):
            node.update_arg(0, node.args[0].args[0])
            node.target = aten.view.default if node.args[0].target in VIEWS else node.target
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in (aten.addmm.default, aten.mm.default):
            _as_linear(node)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "call_function" and node.target in CHEAP:
            node.target = CHEAP[node.target]
    module.recompile()
    return module


def _is_view_of_a_view(node: Node) -> bool:
    source = node.args[0]
    return (
        isinstance(source, Node)
        and source.op == "call_function"
        and source.target in VIEWS
        and len(source.users) == 1
        and isinstance(source.args[0], Node)
        and _is_contiguous(source.args[0])
    )


def _is_contiguous(node: Node) -> bool:
    """Was it when it was traced? Then any shape is a view of it."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _as_linear(product: Node) -> None:
    """view(addmm(bias, view(x), t(weight))) becomes linear(x, weight, bias), where views only flatten and restore rows."""
    bias = product.args[0] if product.target is aten.addmm.default else None
    rows, turned = product.args[-2:]
    if (
        product.kwargs
        or not isinstance(rows, Node)
        or not isinstance(turned, Node)
        or turned.target is not aten.t.default
    ):
        return
    weight = turned.args[0]
    if isinstance(bias, Node) and len(bias.meta["val"].shape) != 1:
        return  # a matrix that is added
    last = next(iter(product.users)) if len(product.users) == 1 else None
    flat = rows.target in VIEWS and isinstance(rows.args[0], Node)
    source = rows.args[0] if flat else rows
    shape = [*source.meta["val"].shape[:-1], weight.meta["val"].shape[0]]
    if flat and (
        source.meta["val"].shape[-1] != rows.meta["val"].shape[-1]
        or last is None
        or last.target not in VIEWS
        or list(last.meta["val"].shape) != shape
    ):
        flat, source = False, rows
    done = last if flat and last is not None else product
    with product.graph.inserting_before(done):
        made = product.graph.call_function(
            aten.linear.default, (source, weight, bias) if bias is not None else (source, weight)
        )
    made.meta = dict(done.meta)
    done.replace_all_uses_with(made)
