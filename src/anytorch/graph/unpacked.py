"""`q, k, v = x` as eager torch computes it: one unbind.

Dynamo writes down three indexings. The gradient of an indexing is a tensor of zeros as large as all of x, written to and
added to the others'; that of an unbind is one stack. Eager torch, which unpacks by unbind, is then the faster one.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

AUGMENTED = {
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
}
AUGMENTED |= {"ilshift", "irshift"}  # `x += y` and the like, as operator calls them


def with_unbinds(module: GraphModule) -> GraphModule:
    """The module itself, with one unbind in place of indexings that take every part of a tensor along its first dimension.

    Parts of an unbind may not be written to: a graph that writes in place stays as it is.
    """
    if any(_writes(node) for node in module.graph.nodes):
        return module
    changed = False
    for node in list(module.graph.nodes):
        parts = {user.args[1]: user for user in node.users if _is_part_of(user, node)}
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or not value.dim() or len(parts) < 2:
            continue
        if type(value.shape[0]) is not int:  # to compare a named size would fix it
            continue
        # Every part once, by numbers: a second `x[0]` is a user of its own, and leaves the tensor indexed.
        if set(parts) != set(range(len(parts))) or value.shape[0] != len(parts) or len(parts) != len(node.users):
            continue
        with module.graph.inserting_after(node):
            unbound = module.graph.call_function(torch.unbind, (node,))
        for part in parts.values():
            part.replace_input_with(node, unbound)
        changed = True
    if changed:
        module.recompile()
    return module


def _is_part_of(user: Node, node: Node) -> bool:
    return (
        user.op == "call_function"
        and user.target is operator.getitem
        and user.args[0] is node
        and type(user.args[1]) is int
    )


def _writes(node: Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        if "out" in node.kwargs or node.kwargs.get("inplace") or node.target is operator.setitem:
            return True
    else:
        return False
    return name in AUGMENTED or (name.endswith("_") and not name.endswith("__"))
