"""Which nodes of a graph are computed by one kernel: groups are merged as long as no work is done twice for it.

Every group begins as one node. A group may be merged with one it feeds if what comes out can be stored by one walk over one
set of axes, and if nothing costly is then computed again and again. Views belong to no kernel: they are read through.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from anytorch.graph.ir import Builder, Graph
from anytorch.graph.loops import Kernel, Reduction, kernel_of
from anytorch.graph.ops import HALVES
from anytorch.graph.sizes import Shape, at, row_major, shape_at

ITEM_BYTES = {"bool": 1, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
ONE_TILE = 256  # columns that one tile can cover: what is computed for a tile is computed once for all of these
NARROW = 64  # columns of a product that is computed again beside every tile of a wider one
MOST_BUFFERS = 24  # of a kernel, where a back end does not bind fewer
MOST_NODES = 80


@dataclass(frozen=True)
class Group:
    """Nodes that one kernel computes. `outputs` are those that others read; views of them are not listed."""

    nodes: frozenset[int]
    outputs: tuple[int, ...]
    library: bool = False  # one node, left to torch


@dataclass(frozen=True)
class Partition:
    """Groups in an order in which they can run. `stored` are all nodes that are in memory at some time."""

    graph: Graph
    groups: tuple[Group, ...]

    @cached_property
    def stored(self) -> dict[int, Shape]:
        kept = [number for group in self.groups for number in group.outputs]
        return {number: row_major(self.graph.nodes[number].shape) for number in (*self.graph.inputs, *kept)}

    def kernel(self, group: Group) -> Kernel:
        outside = {number: strides for number, strides in self.stored.items() if number not in group.nodes}
        return kernel_of(self.graph, group.outputs, outside)


def is_free(graph: Graph, number: int) -> bool:
    """Whether it is computed wherever it is needed, at no cost: a view, a number, or a half-precision value made wider."""
    node = graph.nodes[number]
    if node.op == "cast" and node.dtype == "float32":
        return graph.nodes[node.args[0]].dtype in HALVES
    return node.kind == "view" or node.op in ("constant", "iota")


def shown(graph: Graph, number: int) -> int:
    """The node whose memory a node shows: itself, or the one it is a view of."""
    while graph.nodes[number].op in ("permute", "reshape", "slice", "expand"):
        (number,) = graph.nodes[number].args
    return number


def sources(graph: Graph, number: int) -> set[int]:
    """The nodes that are no views and that this one reads, through views."""
    found: set[int] = set()
    left = list(graph.nodes[number].args)
    while left:
        one = left.pop()
        if is_free(graph, one):
            left += graph.nodes[one].args
        elif one not in found:
            found.add(one)
    return found


@dataclass
class _Merger:
    graph: Graph
    known: Mapping[str, int]
    library: frozenset[int]
    repeats: bool
    most_buffers: int
    outputs: set[int] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.graph
        self.computing = [number for number, node in graph if node.kind != "input" and not is_free(graph, number)]
        # Of an output that is a view, what it shows is stored; the view is taken of that.
        self.outputs = {shown(graph, number) for number in graph.outputs}
        self.computing += sorted(n for n in self.outputs if is_free(graph, n) and n not in graph.inputs)
        self.reads = {number: sources(graph, number) for number in self.computing}
        self.readers: dict[int, set[int]] = {number: set() for number in range(len(graph.nodes))}
        for number, found in self.reads.items():
            for one in found:
                self.readers[one].add(number)
        self.of = {number: frozenset({number}) for number in self.computing}
        alone = {number for number in self.computing if graph.nodes[number].kind in ("composite", "gather")}
        # What reads more than a kernel can bind even by itself, through a concat, is left to torch, too.
        many = {number for number in self.computing if len(self.reads[number]) + 1 > self.most_buffers}
        self.library = self.library | alone | many

    def results(self, nodes: Iterable[int]) -> tuple[int, ...]:
        nodes = set(nodes)
        return tuple(sorted(n for n in nodes if n in self.outputs or any(r not in nodes for r in self.readers[n])))

    def run(self) -> list[Group]:
        changed = True
        while changed:
            changed = False
            for number in self.computing:
                for source in sorted(self.reads[number]):
                    if source in self.of and self.of[source] is not self.of[number]:
                        changed |= self._try(self.of[source], self.of[number])
        groups = {group: None for group in self.of.values()}
        return [Group(nodes, self.results(nodes), bool(nodes & self.library)) for nodes in self._sorted(list(groups))]

    def _try(self, first: frozenset[int], second: frozenset[int]) -> bool:
        if (first | second) & self.library:
            return False
        if any(self.graph.nodes[n].op == "store" and self.readers[n] & second for n in first):
            return False
        both = first | second
        if len(both) > MOST_NODES or not self._acyclic(first, second) or not self._allowed(both):
            return False
        for number in both:
            self.of[number] = both
        return True

    def _acyclic(self, first: frozenset[int], second: frozenset[int]) -> bool:
        """Whether there is no path from the first group to the second one through a third."""
        both = first | second
        left = [r for n in first for r in self.readers[n] if r not in both]
        seen: set[int] = set()
        while left:
            number = left.pop()
            if number in seen:
                continue
            seen.add(number)
            if number in second:
                return False
            group = self.of.get(number, frozenset({number}))
            if group & second:
                return False
            left += [r for n in group for r in self.readers[n] if r not in seen]
        return True

    def _allowed(self, both: frozenset[int]) -> bool:
        results = self.results(both)
        shapes = {self.graph.nodes[number].shape for number in results}
        widest = max(shapes, key=len)
        if any(len(shape) != len(widest) for shape in shapes):
            return False
        for shape in shapes:
            if any(own not in (1, wide) for own, wide in zip(shape, self._widest(shapes), strict=True)):
                return False
        if len(shapes) > 1 and self._widest(shapes) not in shapes:
            return False
        outside = {n: row_major(self.graph.nodes[n].shape) for n in range(len(self.graph.nodes)) if n not in both}
        inside_views = {n: s for n, s in outside.items() if not is_free(self.graph, n)}
        ordered = sorted(results, key=lambda n: self.graph.nodes[n].shape != self._widest(shapes))
        kernel = kernel_of(self.graph, ordered, inside_views)
        return len(kernel.buffers) <= self.most_buffers and not self._wasteful(kernel)

    def _widest(self, shapes: Iterable[tuple[object, ...]]) -> tuple[object, ...]:
        return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True))

    def _wasteful(self, kernel: Kernel) -> bool:
        """Whether a reduction is computed again for every tile of axes that it does not depend on, at a noticeable cost."""
        extents = {axis: at(size, self.known) for axis, size in kernel.extents.items()}

        def volume(axes: Iterable[str]) -> int:
            count = 1
            for axis in axes:
                count *= extents[axis]
            return count

        costs = {one: volume(one.axes | set(one.over)) * (8 if one.how == "dot" else 1) for one in kernel.reductions}
        most = max(costs.values(), default=0)
        inside = self._inside(kernel)
        dots = [one for one in kernel.reductions if one.how == "dot"]
        small = {one for one in dots if self.repeats and inside.get(one) and self._along(one, dots, extents, inside)}
        for one, cost in costs.items():
            if one in small:
                continue
            missing = [
                axis for axis in (*kernel.axes, *inside.get(one, ())) if axis not in one.axes and axis not in one.over
            ]
            repeats = 1
            rows = max((kernel.axes.index(axis) for axis in one.axes if axis in kernel.axes), default=-1)
            for axis in missing:
                if dots:
                    repeats *= -(-extents[axis] // ONE_TILE)  # a tile of columns for each
                elif axis not in kernel.axes or kernel.axes.index(axis) < rows or rows < 0:
                    repeats *= extents[axis]  # whoever walks along a row computes its sums once
            if one.how == "dot" and repeats > 1:
                return True
            if repeats > 1 and cost * repeats > max(most, volume(kernel.axes)):
                return True
        for one in dots:
            # A product in another one's argument is computed in its loop, which pays for attention alone: there a row of
            # scores is used at once and never stored.
            if one in small:
                continue
            if inside.get(one) and not any(r.how == "max" and set(r.over) & inside[one] for r in kernel.reductions):
                return True
        # Two products whose columns are not the same cannot share tiles, unless one is the other's argument.
        return len({one.axes for one in dots if not inside.get(one)}) > 1

    def _along(
        self,
        one: Reduction,
        dots: Iterable[Reduction],
        extents: Mapping[str, int],
        inside: Mapping[Reduction, set[str]],
    ) -> bool:
        """Whether it is a narrow product that can be computed in the loop of a wider one (an adapter of low rank)."""
        width = math.prod(extents[axis] for axis in one.axes & inside[one])
        return width <= NARROW and any(other.over == one.over and not inside.get(other) for other in dots)

    def _inside(self, kernel: Kernel) -> dict[Reduction, set[str]]:
        """The reduced axes of the reductions that each one stands in and changes with."""
        found: dict[Reduction, set[str]] = {}
        for outer in kernel.reductions:
            for body in outer.bodies:
                for expr in body.walk():
                    if expr.reduction and expr.reduction.axes & set(outer.over):
                        found.setdefault(expr.reduction, set()).update(outer.over)
        return found

    def _sorted(self, groups: list[frozenset[int]]) -> list[frozenset[int]]:
        done: list[frozenset[int]] = []
        left = sorted(groups, key=min)
        while left:
            ready = next(
                g
                for g in left
                if all(s not in self.of or self.of[s] in done or self.of[s] is g for n in g for s in self.reads[n])
            )
            done.append(ready)
            left.remove(ready)
        return done


def partition(
    graph: Graph,
    known: Mapping[str, int],
    library: Iterable[int] = (),
    repeats: bool = False,
    most_buffers: int = MOST_BUFFERS,
) -> Partition:
    """Groups of a graph of primitive ops; the nodes in `library` are left to torch. With `repeats` a small product that a
    larger one needs is computed again in each of its tiles. No kernel reads and writes more than `most_buffers` tensors."""
    merger = _Merger(graph, known, frozenset(library), repeats, most_buffers)
    return Partition(graph, tuple(merger.run()))


def moved_bytes(kernel: Kernel, known: Mapping[str, int]) -> int:
    """What a kernel reads and writes if every byte moves once."""
    return sum(int(at(buffer.elements, known)) * ITEM_BYTES[buffer.dtype] for buffer in kernel.buffers)


def least_bytes(graph: Graph, known: Mapping[str, int]) -> int:
    """What any way to compute a graph must move: its inputs and its outputs."""
    total = 0
    for number in (*graph.inputs, *graph.outputs):
        node = graph.nodes[number]
        total += math.prod(shape_at(node.shape, known)) * ITEM_BYTES[node.dtype]
    return total


def subgraph(cut: Partition, kernel: Kernel, group: Group) -> Graph:
    """What one kernel computes, as a graph of its own: its inputs are the buffers it reads, in their order."""
    builder = Builder()
    numbers: dict[int, int] = {}
    for buffer in kernel.buffers:
        if not buffer.written:
            node = cut.graph.nodes[buffer.node]
            numbers[buffer.node] = builder.input(node.shape, node.dtype)

    def build(number: int) -> int:
        if number not in numbers:
            node = cut.graph.nodes[number]
            numbers[number] = builder.add(node.op, *(build(arg) for arg in node.args), **dict(node.attrs))
        return numbers[number]

    return builder.graph([build(number) for number in group.outputs])
