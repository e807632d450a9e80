"""Patterns of nodes: what a hand-written kernel computes, and where a graph has it.

    given("x")                                        any tensor; the kernel reads it
    op("add", given("x"), given("y"), name="sum")     an op on such patterns; a match tells the node by its name
    maybe("silu", p)                                  the op, or p without it
    either(p, q)                                      p, or else q

Sums, products and maxima match in both orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anytorch.graph.ir import Builder, Graph, Node
from anytorch.graph.ops import HALVES
from anytorch.graph.partition import ITEM_BYTES
from anytorch.graph.sizes import shape_at

OP = "handwritten"  # of a node that stands for a match
PREFIX = "handwritten: "  # of the name of a program's step
TURNABLE = {"add", "mul", "maximum", "minimum"}


@dataclass(frozen=True)
class Pattern:
    op: str = ""  # "": any tensor
    args: tuple[Pattern, ...] = ()
    name: str = ""
    attrs: tuple[tuple[str, Any], ...] = ()
    others: tuple[Pattern, ...] = ()  # tried in order where there are any; the rest is empty then


def given(name: str) -> Pattern:
    return Pattern(name=name)


def op(name_of_op: str, *args: Pattern, name: str = "", **attrs: Any) -> Pattern:
    return Pattern(name_of_op, args, name, tuple(attrs.items()))


def either(*patterns: Pattern) -> Pattern:
    return Pattern(others=patterns)


def maybe(name_of_op: str, pattern: Pattern, *more: Pattern, name: str = "") -> Pattern:
    """`pattern` inside an op, or alone."""
    return either(op(name_of_op, pattern, *more, name=name), pattern)


def int8_linear() -> Pattern:
    """x times a matrix of bytes with a float per row, or per group of a row's columns; a bias may follow.

    Weights w[n, k] = codes[n, k] * scale, with scale [n, 1]; or [n, g, 1] for codes seen as [n, g, k / g] (`grouped`); or
    the product is scaled (`after`).
    """
    codes, scale = given("codes"), given("scale")
    wide = op("cast", codes)
    in_groups = op("mul", either(op("reshape", wide), op("cast", op("reshape", codes))), scale, name="groups")
    scaled = either(op("mul", wide, scale), op("reshape", in_groups, name="grouped"))
    weight = either(scaled, op("cast", scaled))
    before = op("matmul", given("x"), op("permute", weight, dims=(1, 0)))
    after = op("mul", op("matmul", given("x"), op("permute", wide, dims=(1, 0))), scale, name="after")
    product = either(before, after)
    return either(op("add", product, given("bias")), product)


@dataclass(frozen=True, eq=False)  # it is an attribute of nodes, which have to have a hash
class Match:
    """A place in a graph that a pattern fits: `tensors` are what it reads, `nodes` the ops that have names, `covered` all
    ops that it computes, of which `output` is the last."""

    graph: Graph
    output: int
    tensors: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    covered: frozenset[int] = frozenset()

    def __contains__(self, name: str) -> bool:
        """Whether a tensor or an op of this name is part of it."""
        return name in self.tensors or name in self.nodes

    def __getitem__(self, name: str) -> Node:
        """The node of a tensor or an op. Raises KeyError if this match has none of that name."""
        return self.graph.nodes[self.tensors[name] if name in self.tensors else self.nodes[name]]

    @property
    def result(self) -> Node:
        return self.graph.nodes[self.output]

    @property
    def arguments(self) -> tuple[int, ...]:
        """The tensors it reads, each once, in the order of the pattern."""
        return tuple(dict.fromkeys(self.tensors.values()))

    @property
    def work(self) -> frozenset[int]:
        """The ops it computes that cost something."""
        return frozenset(number for number in self.covered if not _costs_nothing(self.graph, number))

    def place(self, name: str) -> int:
        """Which of the arguments a tensor is."""
        return self.arguments.index(self.tensors[name])

    def shape(self, name: str, known: Mapping[str, int]) -> tuple[int, ...]:
        return shape_at(self[name].shape, known)

    def dtypes(self) -> set[str]:
        """Of all floats that it reads, and of the result."""
        nodes = [self.graph.nodes[number] for number in self.arguments]
        return {one.dtype for one in (*nodes, self.result)}

    def alone(self) -> Match:
        """The same match in a graph of its own, whose inputs are the arguments."""
        builder = Builder()
        numbers: dict[int, int] = {}
        for number in self.arguments:
            node = self.graph.nodes[number]
            numbers[number] = builder.input(node.shape, node.dtype)
        for number in sorted(self.covered):
            node = self.graph.nodes[number]
            numbers[number] = builder.add(node.op, *(numbers[arg] for arg in node.args), **dict(node.attrs))
        graph = Graph(tuple(builder.nodes), (numbers[self.output],))
        tensors, nodes = ({name: numbers[one] for name, one in found.items()} for found in (self.tensors, self.nodes))
        return Match(graph, numbers[self.output], tensors, nodes, frozenset(numbers[one] for one in self.covered))


def matches(graph: Graph, pattern: Pattern) -> Iterator[Match]:
    """Every place of a pattern in a graph where no other node needs its intermediate values; by their last nodes, and
    for each of these in the order in which the pattern names its choices."""
    for number in range(len(graph.nodes)):
        for found in _found(Match(graph, number), number, pattern):
            if found.work and _closed(found):
                yield found


def _closed(match: Match) -> bool:
    """Whether no other node reads a value that costs something and is not the result."""
    graph = match.graph
    inner = match.work - {match.output}
    return not any(n in graph.outputs or not match.covered.issuperset(graph.users[n]) for n in inner)


def _costs_nothing(graph: Graph, number: int) -> bool:
    """Whether it may be computed twice: a number, a view, or half precision made wider."""
    node = graph.nodes[number]
    wider = node.op == "cast" and node.dtype == "float32" and graph.nodes[node.args[0]].dtype in HALVES
    return wider or node.kind == "view" or node.op in ("constant", "iota")


def _found(match: Match, number: int, pattern: Pattern) -> Iterator[Match]:
    """The matches that come of this one when `pattern` is at node `number`."""
    if pattern.others:
        for other in pattern.others:
            yield from _found(match, number, other)
        return
    if not pattern.op:
        if match.tensors.get(pattern.name, number) == number:
            yield _with(match, tensors={**match.tensors, pattern.name: number})
        return
    node = match.graph.nodes[number]
    if node.op != pattern.op or any(node[name] != value for name, value in pattern.attrs):
        return
    nodes = {**match.nodes, pattern.name: number} if pattern.name else match.nodes
    here = _with(match, nodes=nodes, covered=match.covered | {number})
    orders = [node.args]
    if pattern.op in TURNABLE and len(node.args) == 2:
        orders.append(node.args[::-1])
    for args in orders:
        if len(args) == len(pattern.args):
            yield from _of_all(here, args, pattern.args)


def _of_all(match: Match, numbers: tuple[int, ...], patterns: tuple[Pattern, ...]) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    for found in _found(match, numbers[0], patterns[0]):
        yield from _of_all(found, numbers[1:], patterns[1:])


def _with(match: Match, **changes: Any) -> Match:
    kept = {"tensors": match.tensors, "nodes": match.nodes, "covered": match.covered}
    return Match(match.graph, match.output, **{**kept, **changes})


# --- nodes that stand for a match --------------------------------------------------------------------------------------


def ops_of(node: Node) -> Iterator[str]:
    """The ops that a node stands for: its own, or those of the match that a hand-written kernel computes."""
    if node.op != OP:
        yield node.op
        return
    part: Match = node["part"]
    yield from (part.graph.nodes[number].op for number in sorted(part.covered))


def moved_bytes(node: Node, known: Mapping[str, int]) -> int:
    """What a hand-written kernel reads and writes if every byte moves once."""
    part: Match = node["part"]
    nodes = [part.graph.nodes[number] for number in (*part.graph.inputs, part.output)]
    return sum(math.prod(shape_at(one.shape, known)) * ITEM_BYTES[one.dtype] for one in nodes)
