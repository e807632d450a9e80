"""Small versions of graphs, for checks whose cost grows with the sizes but whose answer does not depend on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from anytorch.errors import GraphError
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.sizes import Shape, Size, SizeLike

LARGE = 24  # sizes beyond this are made smaller
TARGETS = (6, 10, 14, 9, 15, 21)  # what they become: even and odd ones, all different
TRIES, STEPS = 64, 1000  # sizes for all that are tried, and looked for: with many sizes there are too many ways


def shrunk(*graphs: Graph) -> tuple[Graph, ...]:
    """The same graphs with smaller sizes where that is possible; equal sizes stay equal.

    A size that is made of others by reshaping (4096 = 32 x 128) becomes the product of what they become. Where the rules
    of an op refuse the small sizes, as few as possible stay as they are.
    """
    sizes = sorted({size for graph in graphs for _, node in graph for size in node.shape if isinstance(size, int)})
    sizes = [size for size in sizes if size > LARGE]
    reshapes = {
        (graph.nodes[node.args[0]].shape, node.shape) for graph in graphs for _, node in graph if node.op == "reshape"
    }
    found = (one for one in islice(_mappings(sizes, reshapes, {}), STEPS) if one is not None)
    for mapping in islice(found, TRIES):
        if all(_fits(graph, mapping) for graph in graphs):
            break
    else:  # one after another, those that fit without what larger ones may become
        mapping = {}
        for size in sizes:
            ways = ({**mapping, size: new} for new in _ways(size, mapping))
            mapping = next((one for one in ways if all(_fits(graph, one) for graph in graphs)), mapping)
    return tuple(_mapped(graph, mapping) for graph in graphs)


def _mappings(
    sizes: Sequence[int], reshapes: Iterable[tuple[Shape, Shape]], mapping: Mapping[int, int]
) -> Iterator[Mapping[int, int] | None]:
    """What all sizes may become together, so that no reshape changes the number of elements; None for every dead end."""
    if not sizes:
        yield mapping
        return
    for new in _ways(sizes[0], mapping):
        more = {**mapping, sizes[0]: new}
        if all(
            _count(before, more) == _count(after, more) or None in (_count(before, more), _count(after, more))
            for before, after in reshapes
        ):
            yield from _mappings(sizes[1:], reshapes, more)
        else:
            yield None


def _count(shape: Shape, mapping: Mapping[int, int]) -> int | None:
    """The elements of a shape when it is small; None while that is not known."""
    if not all(isinstance(size, int) and (size <= LARGE or size in mapping) for size in shape):
        return None
    return math.prod(mapping.get(size, size) for size in shape if isinstance(size, int))


def _ways(size: int, mapping: Mapping[int, int]) -> Iterable[int]:
    """What a size may become: products of two others, where it is the product of them, or something new."""
    made = [
        new * mapping.get(size // one, size // one) for one, new in mapping.items() if size % one == 0 and size > one
    ]
    return dict.fromkeys([*made, TARGETS[len(mapping) % len(TARGETS)]])


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
                attrs[name] = _place(attrs[name], old[dim], new[dim], mapping)
        numbers.append(builder.add(node.op, *(numbers[arg] for arg in node.args), **attrs))
    return builder.graph(numbers[one] for one in graph.outputs)


def _size(size: SizeLike, mapping: Mapping[int, int]) -> SizeLike:
    if isinstance(size, int):
        return mapping.get(size, size)
    return Size({names: mapping.get(count, count) for names, count in size._terms})


def _place(place: SizeLike, old: SizeLike, new: SizeLike, mapping: Mapping[int, int]) -> SizeLike:
    """A cut at the same share of the length."""
    if place == old:
        return new
    if isinstance(place, int) and isinstance(old, int) and isinstance(new, int) and old:
        if place * new % old:
            raise GraphError("a slice does not fit the small size")
        return place * new // old
    return _size(place, mapping) if isinstance(place, Size) else place
