"""The form of a kernel graph: a list of nodes, each an op on earlier ones, with its shape and dtype. Immutable.

    node 0  input                     [b, 4096]  bfloat16
    node 1  rms_norm(0, eps=1e-06)    [b, 4096]  bfloat16

`Builder` appends nodes and finds their shapes by the rules in `ops`. The same op on the same nodes is the same node, so
equal subexpressions are computed once. A `Graph` is what comes out of it; rewrites read one graph and build another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anytorch.errors import GraphError
from anytorch.graph import ops
from anytorch.graph.sizes import Shape, Size, SizeLike, names_of, read_size, words

FORMAT = 1  # of the JSON form
DEEPEST = 16  # lists within lists of an attribute; ours have three


@dataclass(frozen=True)
class Node:
    """`args` are the numbers of earlier nodes. `attrs` are sorted pairs of what else the op needs to know."""

    op: str
    args: tuple[int, ...]
    attrs: tuple[tuple[str, Any], ...]
    shape: Shape
    dtype: str

    def __getitem__(self, name: str) -> Any:
        """An attribute; None if the op was built without it."""
        return dict(self.attrs).get(name)

    @property
    def kind(self) -> str:
        return ops.OPS[self.op].kind

    def __str__(self) -> str:
        said = [*(f"%{arg}" for arg in self.args), *(f"{name}={_said(value)}" for name, value in self.attrs)]
        return f"{self.op}({', '.join(said)}): {self.dtype}{words(self.shape)}"


@dataclass(frozen=True)
class Graph:
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the input nodes, in the order in which they are passed."""
        found = [number for number, node in enumerate(self.nodes) if node.op == "input"]
        return tuple(sorted(found, key=lambda number: self.nodes[number]["index"]))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For every node, the nodes that read it."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for arg in dict.fromkeys(node.args):
                found[arg].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def sizes(self) -> frozenset[str]:
        """The names of the sizes that are known only when it is called."""
        return frozenset().union(*(names_of(node.shape) for node in self.nodes))

    @cached_property
    def key(self) -> str:
        """32 hex digits that tell it from every other graph."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:32]

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        return iter(enumerate(self.nodes))

    def __str__(self) -> str:
        lines = [f"%{number} = {node}" for number, node in self]
        return "\n".join([*lines, f"return {', '.join(f'%{one}' for one in self.outputs)}"])

    def to_json(self) -> dict[str, Any]:
        nodes = [
            {"op": node.op, "args": list(node.args), "attrs": {name: _written(value) for name, value in node.attrs}}
            for node in self.nodes
        ]
        return {"format": FORMAT, "nodes": nodes, "outputs": list(self.outputs)}

    @classmethod
    def from_json(cls, body: Any) -> Graph:
        """The graph that `to_json` gave. Shapes are found anew, so a file cannot claim false ones. Raises GraphError."""
        if not isinstance(body, Mapping) or body.get("format") != FORMAT:
            found = body.get("format") if isinstance(body, Mapping) else type(body).__name__
            raise GraphError(f"not a kernel graph of format {FORMAT}: {found!r}", hint="save it again with to_json()")
        builder = Builder()
        numbers: list[int] = []
        try:
            for one in body["nodes"]:
                attrs = {str(name): _read(value) for name, value in one["attrs"].items()}
                numbers.append(builder.add(str(one["op"]), *(_nth(numbers, arg) for arg in one["args"]), **attrs))
            outputs = [_nth(numbers, one) for one in body["outputs"]]
        except (KeyError, TypeError, AttributeError, ValueError, IndexError) as exc:
            if isinstance(exc, GraphError):
                raise
            raise GraphError(f"damaged kernel graph: {type(exc).__name__}: {exc}") from exc
        return builder.graph(outputs)


def resized(graph: Graph, change: Callable[[Size], SizeLike]) -> Graph:
    """The graph with its named sizes changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return change(value) if isinstance(value, Size) else value

    builder = Builder()
    for _, node in graph:
        builder.add(node.op, *node.args, **{name: changed(value) for name, value in node.attrs})
    return builder.graph(graph.outputs)


class Builder:
    """Appends nodes. `add` returns the number of a node that computes the op, which may be an earlier one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[tuple[Any, ...], int] = {}

    @classmethod
    def of(cls, graph: Graph) -> Builder:
        """A builder that has these nodes already, under the same numbers."""
        made = cls()
        for number, node in graph:
            if made.add(node.op, *node.args, **dict(node.attrs)) != number:
                raise GraphError("damaged kernel graph: a node stands twice in it")
        return made

    def add(self, op: str, *args: int, **attrs: Any) -> int:
        if op not in ops.OPS:
            raise GraphError(f"unknown op {op!r}; known: {', '.join(sorted(ops.OPS))}")
        kept = tuple(sorted((name, _frozen(value)) for name, value in attrs.items() if value is not None))
        key = (op, args, tuple((name, type(value), value) for name, value in kept))  # 1, 1.0 and True are told apart
        if op != "input" and key in self._known:
            return self._known[key]
        shape, dtype = ops.OPS[op].rule([self.nodes[arg] for arg in args], dict(kept))
        ops.check_bytes(op, dtype, [self.nodes[arg].dtype for arg in args])
        self.nodes.append(Node(op, args, kept, shape, dtype))
        self._known[key] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def input(self, shape: Iterable[SizeLike | str], dtype: str, **attrs: Any) -> int:
        index = sum(node.op == "input" for node in self.nodes)
        return self.add("input", shape=tuple(read_size(size) for size in shape), dtype=dtype, index=index, **attrs)

    def constant(self, value: float | Size, dtype: str) -> int:
        return self.add("constant", value=value, dtype=dtype)

    def graph(self, outputs: Iterable[int]) -> Graph:
        """The graph of these outputs, without nodes that none of them needs. Inputs stay."""
        outputs = tuple(outputs)
        needed: set[int] = {number for number, node in enumerate(self.nodes) if node.op == "input"}
        left = list(outputs)
        while left:
            number = left.pop()
            if number not in needed or self.nodes[number].op == "input":
                needed.add(number)
                left += self.nodes[number].args
        new = {old: number for number, old in enumerate(sorted(needed))}
        nodes = [self.nodes[old] for old in sorted(needed)]
        moved = [Node(one.op, tuple(new[arg] for arg in one.args), one.attrs, one.shape, one.dtype) for one in nodes]
        return Graph(tuple(moved), tuple(new[one] for one in outputs))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


def _said(value: Any) -> str:
    return words(value) if isinstance(value, tuple) else str(value)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    if isinstance(value, float) and value - value != 0:  # infinities and NaN are not JSON
        return {"float": str(value)}
    return value if isinstance(value, (int, float, str, bool)) else {"size": str(value)}


def _read(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise GraphError("damaged kernel graph: an attribute is nested too deeply")
    if isinstance(value, list):
        return tuple(_read(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        ((kind, text),) = value.items()
        return float(text) if kind == "float" else read_size(text)
    return value


def _nth(numbers: list[int], index: Any) -> int:
    if not isinstance(index, int) or not 0 <= index < len(numbers):
        raise GraphError(f"damaged kernel graph: node {index!r} is used before it is made")
    return numbers[index]
