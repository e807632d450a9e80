"""The loop form: whatever an emitter computes of it, no load leaves its buffer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest

from anytorch.graph.indices import Index
from anytorch.graph.loops import Expr, Kernel
from anytorch.graph.lower import lowered
from anytorch.graph.partition import partition
from anytorch.graph.rewrite import rewritten, split_products, split_softmax
from anytorch.graph.sizes import at
from tests.graph.cases import CASES

Guard = tuple[Expr, bool]  # a condition, and whether it holds


def _number(index: Index, point: Mapping[str, int], known: Mapping[str, int]) -> int:
    total = at(index.start, known)
    for atom, step in index.terms:
        if isinstance(atom, str):
            value = point[atom]
        else:
            inner, by = _number(atom.index, point, known), at(atom.by, known)
            assert inner >= 0, f"{index}: // and % of negative numbers differ between languages"
            value = inner // by if atom.how == "//" else inner % by
        total += value * at(step, known)
    return int(total)


def _loads(expr: Expr, guards: tuple[Guard, ...]) -> Iterator[tuple[Expr, tuple[Guard, ...]]]:
    """Every load, and what it is masked with. Reductions are computed whether they are chosen or not."""
    if expr.op == "load":
        yield expr, guards
    if expr.reduction:
        for body in expr.reduction.bodies:
            yield from _loads(body, ())
    for place, arg in enumerate(expr.args):
        more = ((expr.args[0], place == 1),) if expr.op == "choose" and place else ()
        yield from _loads(arg, (*guards, *more))


def _holds(guard: Guard, point: Mapping[str, int], known: Mapping[str, int]) -> bool:
    condition, wanted = guard
    assert condition.op == "lt"
    left, right = condition.args
    assert left.index is not None and right.index is not None
    return (_number(left.index, point, known) < _number(right.index, point, known)) is wanted


def _check(kernel: Kernel, known: Mapping[str, int]) -> int:
    checked = 0
    for store in kernel.stores:
        for load, guards in set(_loads(store.value, ())):
            assert load.index is not None
            axes = sorted(load.index.axes)
            # A mask has the dimensions of what it masks: a guard with others cannot be used.
            usable = [guard for guard in guards if guard[0].axes <= load.index.axes]
            elements = at(kernel.buffers[load.buffer].elements, known)
            for values in itertools.product(*(range(at(kernel.extents[axis], known)) for axis in axes)):
                point = dict(zip(axes, values, strict=True))
                if all(_holds(guard, point, known) for guard in usable):
                    place = _number(load.index, point, known)
                    assert 0 <= place < elements, f"{load} at {point} of {elements} in\n{kernel}"
                    checked += 1
    return checked


@pytest.mark.parametrize("name", CASES)
def test_no_load_leaves_its_buffer(name: str) -> None:
    graph, known = CASES[name]()
    low = lowered(graph)
    better = rewritten(low)
    for made in {low, better, rewritten(better, split_products(2)), rewritten(better, split_softmax(4))}:
        cut = partition(made, known)
        kernels = [cut.kernel(group) for group in cut.groups if not group.library]
        assert not kernels or sum(_check(kernel, known) for kernel in kernels)
