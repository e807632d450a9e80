"""Inputs that a compiled graph changes: a cache's new row is written into the cache, not into a copy of all of it.

Functional graphs say `copy_(cache, slice_scatter(cache, row, …))`: a new cache, copied over the old one at the end. Where
nothing else reads the old values, the op that changes in place means the same. All other changes are made when the graph is
done, so that whoever reads an old value has read it by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def write_slice(
    x: torch.Tensor, value: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> torch.Tensor:
    """`x`, with a slice of it overwritten by `value`."""
    aten.slice.Tensor(x, dim, start, end, step).copy_(value)
    return x


def write_selected(x: torch.Tensor, value: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    x.select(dim, index).copy_(value)
    return x


IN_PLACE: dict[Any, Callable[..., Any]] = {
    aten.slice_scatter.default: write_slice,
    aten.select_scatter.default: write_selected,
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}
VIEWS = (aten.slice.Tensor, aten.select.int)


def with_changes(module: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Rewrite the changes of inputs in `module`; returns what to put around the function that it is compiled to.

    Inputs that are changed in place are so within the graph: whoever reads the new value takes it from that op, and so comes
    after it, however nodes are ordered.
    """
    graph = module.graph
    places = {node: place for place, node in enumerate(one for one in graph.nodes if one.op == "placeholder")}
    late: list[tuple[int, Node]] = []
    for node in [one for one in graph.nodes if one.target is aten.copy_.default and one.args[0] in places]:
        changed, made = node.args[0], node.args[1]
        for user in [one for one in node.users if one.op != "output"]:  # later readers read the new values
            user.replace_input_with(node, made)
        if _is_only_written(changed, made, node):
            node.replace_all_uses_with(_write(graph, changed, made))
        else:
            node.replace_all_uses_with(changed)  # which has the new values by the time that it is returned
            late.append((places[changed], made))
        graph.erase_node(node)
    if not late:
        graph.eliminate_dead_code(_is_impure)
        module.recompile()
        return lambda function: function
    output = next(one for one in graph.nodes if one.op == "output")
    results = list(output.args[0])
    output.args = ((*results, *(made for _, made in late)),)
    graph.eliminate_dead_code(_is_impure)
    module.recompile()
    return lambda function: _changing(function, len(results), [place for place, _ in late])


def _is_impure(node: Node) -> bool:
    changes = node.target in IN_PLACE.values()
    return changes or node.is_impure()


def _is_only_written(changed: Node, made: Node, last: Node) -> bool:
    """Whether `made` is the input with a part of it overwritten, and no node reads the old values."""
    if made.target not in IN_PLACE or made.args[0] is not changed:
        return False
    if any(changed in _sources(arg) for arg in (*made.args[1:], *made.kwargs.values()) if arg is not _copied(made)):
        return False
    return all(user in (made, last) or _is_target(user) for user in changed.users)


def _copied(made: Node) -> Any:
    """What is written, where the graph says `copy(slice(x), value)`: of the slice only shape and dtype count."""
    value = made.args[1] if len(made.args) > 1 else None
    return value if isinstance(value, Node) and value.target is aten.copy.default else None


def _is_target(view: Node) -> bool:
    """Whether it is a view of which only shape and dtype are read."""
    return view.target in VIEWS and all(
        user.target is aten.copy.default and user.args[0] is view and user.args[1] is not view for user in view.users
    )


def _sources(arg: Any) -> set[Node]:
    """The nodes that an argument names itself."""
    if isinstance(arg, Node):
        return {arg}
    return set().union(*map(_sources, arg)) if isinstance(arg, (list, tuple)) else set()


def _write(graph: torch.fx.Graph, changed: Node, made: Node) -> Node:
    args = list(made.args)
    copied = _copied(made)
    if copied is not None and _is_target(copied.args[0]) and copied.args[0].args[0] is changed:
        args[1] = copied.args[1]  # the in-place op repeats and converts as `copy` does
    with graph.inserting_before(made):
        written = graph.call_function(IN_PLACE[made.target], tuple(args), dict(made.kwargs))
    written.meta = dict(made.meta)
    made.replace_all_uses_with(written)
    graph.erase_node(made)
    for user in list(written.users):
        if user.target is aten.alias.default:  # which is no computation, and would tie a region to this change
            user.replace_all_uses_with(written)
            graph.erase_node(user)
    return written


def _changing(function: Callable[..., Any], count: int, places: Sequence[int]) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        made = list(function(*inputs))
        for place, value in zip(places, made[count:], strict=True):
            inputs[place].copy_(value)
        return made[:count]

    return run
