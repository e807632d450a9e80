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
PRODUCTS = (aten.addmm.default, aten.mm.default)


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
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in PRODUCTS:
            _as_linear(node)
    for node in reversed(list(graph.nodes)):  # these alone: a node that nobody reads may write
        if node.target in (*VIEWS, aten.t.default, *PRODUCTS) and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in CHEAP:
            node.target = CHEAP[node.target]
    module.recompile()
    return module


def _is_view_of_a_view(node: Node) -> bool:
    source = node.args[0]
    return (
        isinstance(source, Node)
        and source.target in VIEWS
        and len(source.users) == 1
        and _is_contiguous(source.args[0])
    )


def _is_contiguous(source: Any) -> bool:
    """Whether it was contiguous when it was traced. Then any shape is a view of it."""
    value = source.meta.get("val") if isinstance(source, Node) else None
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _shape(node: Any) -> list[Any]:
    return list(node.meta["val"].shape)


def _as_linear(product: Node) -> None:
    """view(addmm(bias, view(x), t(weight))) becomes linear(x, weight, bias), where views only flatten and restore rows."""
    bias: Any = product.args[0] if product.target is aten.addmm.default else None
    rows, turned = product.args[-2:]
    if (
        product.kwargs
        or not isinstance(rows, Node)
        or not isinstance(turned, Node)
        or turned.target is not aten.t.default
    ):
        return
    if bias is not None and len(_shape(bias)) != 1:
        return  # a matrix that is added
    weight, source, done = turned.args[0], rows, product
    if rows.target in VIEWS and len(product.users) == 1:
        whole, (last, *_) = rows.args[0], product.users
        alike = _shape(whole)[-1] == _shape(rows)[-1] and last.target in VIEWS
        if alike and _shape(last) == [*_shape(whole)[:-1], _shape(weight)[0]]:
            source, done = whole, last  # type: ignore[assignment]
    given = (source, weight) if bias is None else (source, weight, bias)
    with product.graph.inserting_before(done):
        made = product.graph.call_function(aten.linear.default, given)
    made.meta = dict(done.meta)
    done.replace_all_uses_with(made)
