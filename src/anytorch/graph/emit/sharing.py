"""What all emitters share: scopes of lines, which reductions can share a loop, and which sizes a kernel must be told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anytorch.graph.indices import Index, Part
from anytorch.graph.loops import Expr, Kernel, Reduction
from anytorch.graph.sizes import Size


@dataclass
class Scope:
    """Lines at one depth, and the names of values that stand there. `axes` are those that its loop binds."""

    depth: int
    axes: frozenset[str] = frozenset()
    lines: list[str] = field(default_factory=list)
    names: dict[Any, str] = field(default_factory=dict)


def outermost(expr: Expr) -> Iterator[Reduction]:
    """The reductions in an expression that are in no other one of it."""
    if expr.reduction:
        yield expr.reduction
        return
    for arg in expr.args:
        yield from outermost(arg)


def together(kernel: Kernel, first: Reduction, done: Iterable[object], bound: frozenset[str]) -> list[Reduction]:
    """The reductions to compute in one loop with `first`: over the same axes, of axes that are bound, and depending on none
    that is still to come, unless that is a maximum they are only scaled by. Maxima come before such sums."""
    known = set(done)
    pending = [one for one in kernel.reductions if one.over == first.over and one not in known and one.axes <= bound]
    chosen: list[Reduction] = []
    for one in pending:
        inner = {found for body in one.bodies for found in body.reductions if found in pending}
        if not inner or (inner <= set(chosen) and all(scaled_by(one, top) for top in inner)):
            chosen.append(one)
    return chosen if first in chosen else [first]


def whole_numbers(one: Reduction) -> bool:
    """Whether it folds integers. Emitters that fold in float32 must not."""
    return any(body.dtype in ("int8", "int32", "int64") for body in one.bodies)


def maxima(one: Reduction, group: Sequence[Reduction]) -> list[Reduction]:
    """The reductions of its group that a sum depends on."""
    return [top for top in group if any(top in body.reductions for body in one.bodies)]


def scaled_by(one: Reduction, top: Reduction) -> bool:
    """Whether this sum depends on that maximum only as exactly one factor exp(x - maximum).

    Then it may be summed with the maximum so far, and scaled by exp(old - new) whenever that grows.
    """
    if top.how != "max" or one.how not in ("sum", "dot"):
        return False

    def factors(expr: Expr) -> Iterator[Expr]:
        if expr.op == "mul":
            for arg in expr.args:
                yield from factors(arg)
        elif expr.op == "cast" or (expr.op == "div" and top not in expr.args[1].reductions):
            yield from factors(expr.args[0])
        else:
            yield expr

    def shifted(expr: Expr) -> bool:
        if expr.op != "exp" or expr.args[0].op != "sub":
            return False
        x, shift = expr.args[0].args
        if shift.op == "maximum" and shift.args[1].op == "constant":
            shift = shift.args[0]  # bounded from below, for rows that are masked altogether
        return shift.reduction == top and top not in x.reductions

    touching = [factor for body in one.bodies for factor in factors(body) if top in factor.reductions]
    return len(touching) == 1 and shifted(touching[0])


def sizes_of(kernel: Kernel) -> list[str]:
    """The names of the sizes a kernel needs to know, in the order of its arguments."""
    found: set[str] = set()
    for size in kernel.extents.values():
        found |= size.names if isinstance(size, Size) else set()
    for store in kernel.stores:
        for expr in store.value.walk():
            found |= _named(expr.index) if expr.index else set()
        found |= _named(store.index)
    return sorted(found)


def _named(index: Index) -> set[str]:
    found = set(index.start.names) if isinstance(index.start, Size) else set()
    for atom, step in index.terms:
        found |= step.names if isinstance(step, Size) else set()
        if isinstance(atom, Part):
            found |= _named(atom.index) | (set(atom.by.names) if isinstance(atom.by, Size) else set())
    return found
