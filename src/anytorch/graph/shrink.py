"""Small versions of graphs, for checks whose cost grows with the sizes but whose answer does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anytorch.errors import GraphError
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.sizes import Size, SizeLike

LARGE = 24  # sizes beyond this are made smaller
TARGETS = (6, 10, 14, 9, 15, 21)  # what they become: even and odd ones, all different


def shrunk(*graphs: Graph) -> tuple[Graph, ...]:
    """The same graphs with smaller sizes where that is possible; equal sizes stay equal.

    A size that is made of others by reshaping (4096 = 32 x 128) becomes the product of what they become. Where the rules
    of an op refuse the small sizes, that size stays as it is.
    """
    sizes = sorted({size for graph in graphs for _, node in graph for size in node.shape if isinstance(size, int)})
    mapping: dict[int, int] = {}
    fixed: set[int] = set()
    for size in sizes:
        if size <= LARGE:
            continue
        mapping[size] = _factored(size, mapping) or TARGETS[len(mapping) % len(TARGETS)]
        if not all(_fits(graph, mapping) for graph in graphs):
            # Perhaps it fits only together with a larger one: those are tried below with all of them.
            fixed.add(size)
    if fixed and not all(_fits(graph, mapping) for graph in graphs):
        mapping = {size: new for size, new in mapping.items() if size not in fixed}
    if not all(_fits(graph, mapping) for graph in graphs):
        return graphs
    return tuple(_mapped(graph, mapping) for graph in graphs)


def _factored(size: int, mapping: Mapping[int, int]) -> int | None:
    """The product of two sizes that were mapped, where this one is the product of them."""
    for one, new in mapping.items():
        rest = size // one
        if size % one == 0 and rest > 1:
            return new * mapping.get(rest, rest)
    return None


def _fits(graph: Graph, mapping: Mapping[int, int]) -> bool:
    try:
        _mapped(graph, mapping)
    except GraphError:
        return False
    return True


def _mapped(graph: Graph, mapping: Mapping[int, int]) -> Graph:
    builder = Builder()
    numbers: list[int] = []
    for _, node in graph:
        attrs: dict[str, Any] = dict(node.attrs)
        if "shape" in attrs:
            attrs["shape"] = tuple(_size(size, mapping) for size in attrs["shape"])
        attrs.pop("strides", None)
        if node.op == "slice":
            old, new = graph.nodes[node.args[0]].shape, builder.nodes[numbers[node.args[0]]].shape
            dim = node["dim"] % len(old)
            for name in ("start", "stop"):
                attrs[name] = _place(attrs[name], old[dim], new[dim])
        numbers.append(builder.add(node.op, *(numbers[arg] for arg in node.args), **attrs))
    return builder.graph(numbers[one] for one in graph.outputs)


def _size(size: SizeLike, mapping: Mapping[int, int]) -> SizeLike:
    if isinstance(size, int):
        return mapping.get(size, size)
    return Size({names: mapping.get(count, count) for names, count in size._terms})


def _place(place: SizeLike, old: SizeLike, new: SizeLike) -> SizeLike:
    """A cut at the same share of the length."""
    if place == old:
        return new
    if isinstance(place, int) and isinstance(old, int) and isinstance(new, int) and old:
        if place * new % old:
            raise GraphError("a slice does not fit the small size")
        return place * new // old
    return place
