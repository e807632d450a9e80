"""What builds a kernel graph from the nodes of an FX graph, given a rule for each op. The rules are in `tracing`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node as FxNode

from anytorch.errors import GraphError
from anytorch.graph import ops
from anytorch.graph.ir import Builder
from anytorch.graph.sizes import Size, SizeLike, divided, product


class Untraceable(Exception):
    """An op, a dtype or an argument that kernel graphs have no form for."""


def size_of(size: Any) -> SizeLike:
    """A size of a traced tensor: a number, or a polynomial in torch's symbols. Raises Untraceable."""
    if isinstance(size, int):
        return size
    expression = getattr(getattr(size, "node", None), "expr", None)
    if expression is None:
        raise Untraceable(f"a size {size!r}")
    try:
        return _polynomial(expression)
    except (AttributeError, ValueError, TypeError) as exc:
        raise Untraceable(f"a size {expression}") from exc


def _polynomial(expression: Any) -> SizeLike:
    """Of one of torch's expressions. Raises ValueError, or what sympy does, for one that is not a polynomial."""
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return Size.named(str(expression))
    if expression.is_Add:
        total: SizeLike = 0
        for one in expression.args:
            total = total + _polynomial(one)
        return total
    if expression.is_Mul:
        return product(map(_polynomial, expression.args))
    if expression.is_Pow and expression.exp.is_Integer and expression.exp > 0:
        return product([_polynomial(expression.base)] * int(expression.exp))
    if type(expression).__name__ == "FloorDiv":  # torch's own; (b**2)//b is b, which it does not see
        return divided(*map(_polynomial, expression.args))
    raise ValueError(f"{expression} is not a polynomial")


def dtype_of(value: torch.Tensor) -> str:
    name = str(value.dtype).removeprefix("torch.")
    if name not in ops.DTYPES:
        raise Untraceable(f"dtype {name}")
    return name


class Tracer:
    """Builds a graph from FX nodes by `rules`: an op's rule makes the node, or a tuple of nodes, that computes it.

    `add` needs the nodes in order; `numbers` says which node of the graph each became.
    """

    def __init__(self, rules: Mapping[Any, Callable[..., Any]]) -> None:
        self.b = Builder()
        self.rules = rules
        self.numbers: dict[FxNode, int] = {}
        self.several: dict[FxNode, Sequence[int]] = {}  # of ops that give more than one tensor

    def input(self, node: FxNode, name: str | None = None) -> None:
        value = node.meta["val"]
        self.numbers[node] = self.b.input([size_of(size) for size in value.shape], dtype_of(value), name=name)

    def add(self, node: FxNode) -> None:
        """Raises Untraceable if the node has no form."""
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source, place = node.args
            known = self.several.get(source, ()) if isinstance(source, FxNode) else ()
            if not isinstance(place, int) or place >= len(known):
                raise Untraceable(f"result {place} of {getattr(source, 'target', source)}")
            self.numbers[node] = self._checked(node, known[place], value)
            return
        rule = self.rules.get(node.target)
        if rule is None:
            raise Untraceable(str(node.target))
        try:
            made = rule(self, node, *node.args, **node.kwargs)
        except (GraphError, TypeError, ValueError) as exc:
            raise Untraceable(f"{node.target}: {exc}") from exc
        if isinstance(made, tuple):
            self.several[node] = made
        else:
            self.numbers[node] = self._checked(node, made, value)

    def _checked(self, node: FxNode, number: int, value: Any) -> int:
        """The node, in the dtype that torch gives it. Raises Untraceable if it has another shape."""
        if not isinstance(value, torch.Tensor):
            raise Untraceable(f"{node.target} gives no tensor")
        wanted = tuple(size_of(size) for size in value.shape)
        if self.b.nodes[number].shape != wanted:
            raise Untraceable(f"{node.target}: shape {self.b.nodes[number].shape} is not {wanted}")
        if self.b.nodes[number].dtype != dtype_of(value):
            number = self.b.add("cast", number, dtype=dtype_of(value))
        return number

    def operand(self, value: Any, beside: str = "float32") -> int:
        """The number of an argument: a node's, or that of a constant in the dtype of what it stands beside."""
        if isinstance(value, FxNode):
            if value not in self.numbers and isinstance(value.meta.get("val"), torch.SymInt):
                return self._size(size_of(value.meta["val"]), beside)
            return self.numbers[value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise Untraceable(f"an argument {value!r}")
        if isinstance(value, int) and beside not in ops.FLOATS and beside != "bool":
            return self.b.constant(value, beside)
        return self.b.constant(float(value), beside if beside in ops.FLOATS else "float32")

    def _size(self, size: SizeLike, beside: str) -> int:
        """A named size that is computed with, as a number of the dtype of what it stands beside."""
        number = self.b.constant(size, "int64")
        return self.b.add("cast", number, dtype=beside) if beside in ops.FLOATS else number

    def beside(self, *values: Any) -> str:
        """The dtype of the tensors among the arguments."""
        nodes = [self.numbers[value] for value in values if isinstance(value, FxNode) and value in self.numbers]
        found = [self.b.nodes[number].dtype for number in nodes]
        return ops.promoted(found) if found else "float32"

    def shape(self, value: Any) -> tuple[SizeLike, ...]:
        return self.b.nodes[self.operand(value)].shape
