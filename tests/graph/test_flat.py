"""Axes that are joined: rows shorter than a vector are computed as one long row, where they lie like one."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from anytorch.graph import verify
from anytorch.graph.back import cpp as back
from anytorch.graph.emit.flat import flattened
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.loops import Kernel
from anytorch.graph.lower import lowered
from anytorch.graph.partition import partition
from anytorch.graph.program import Program, Step
from anytorch.graph.rewrite import rewritten
from tests.graph.cases import CASES

CPU = torch.device("cpu")


def _of_two(first: tuple[int | str, ...], second: tuple[int | str, ...]) -> Graph:
    b = Builder()
    x, y = b.input(first, "float32"), b.input(second, "float32")
    return b.graph([b.add("add", b.add("silu", x), y)])


def _turned() -> Graph:
    b = Builder()
    x, y = b.input((5, 4, 6), "float32"), b.input((4, 5, 6), "float32")
    return b.graph([b.add("add", b.add("permute", x, dims=(1, 0, 2)), y)])


def _with_places() -> Graph:
    """Positions along the last axis: they begin anew in every row."""
    b = Builder()
    x = b.input((7, 6), "float32")
    return b.graph([b.add("add", x, b.add("iota", shape=(7, 6), dim=1, dtype="float32"))])


def _two_results() -> Graph:
    b = Builder()
    x = b.input((3, 5, 6), "float32")
    made = b.add("silu", x)
    return b.graph([made, b.add("exp", made)])


def _sums() -> Graph:
    b = Builder()
    return b.graph([b.add("reduce", b.input((4, 5, 6), "float32"), how="sum", dims=(2,))])


MADE: dict[str, tuple[Graph, dict[str, int], list[int | str]]] = {
    "short rows": (_of_two((50, 3), (50, 3)), {}, [150]),
    "four dimensions": (_of_two((2, 3, 4, 5), (2, 3, 4, 5)), {}, [120]),
    "a size of 1 between": (_of_two((8, 1, 6), (8, 1, 6)), {}, [48]),
    "a named size": (_of_two(("b", 4, 6), ("b", 4, 6)), {"b": 9}, ["24*b"]),
    "a bias": (_of_two((20, 6), (6,)), {}, [20, 6]),
    "a bias of two dimensions": (_of_two((20, 4, 6), (4, 6)), {}, [20, 24]),
    "a number for every row": (_of_two((4, 5, 6), (4, 5, 1)), {}, [20, 6]),
    "turned": (_turned(), {}, [4, 5, 6]),
    "positions": (_with_places(), {}, [7, 6]),
    "two results": (_two_results(), {}, [90]),
    "sums": (_sums(), {}, [4, 5]),
}


def _kernel(graph: Graph, known: dict[str, int]) -> Kernel:
    cut = partition(rewritten(lowered(graph)), known)
    (group,) = cut.groups
    return cut.kernel(group)


@pytest.mark.parametrize("name", MADE)
def test_axes_are_joined_where_all_lies_as_if_they_were_one(name: str) -> None:
    graph, known, extents = MADE[name]
    kernel = flattened(_kernel(graph, known))
    assert [size if isinstance(size, int) else str(size) for size in map(kernel.extents.get, kernel.axes)] == extents
    assert flattened(kernel) == kernel


@pytest.mark.parametrize("name", ["short rows", "a named size", "a bias of two dimensions", "two results", "turned"])
def test_joined_kernels_are_right(name: str) -> None:
    graph, known, _ = MADE[name]
    cut = partition(rewritten(lowered(graph)), known)
    (group,) = cut.groups
    kernel = cut.kernel(group)
    for schedule in (back.candidates(kernel, known)[0], back.candidates(kernel, known)[-1]):
        assert schedule.name in [one.name for one in back.considered(kernel, known)]
        program = Program(cut, [Step(group, kernel, back.prepare(kernel, schedule))])
        verify.check(graph, known, partial(program, poison=True), CPU, ("normal",))


def test_short_rows_are_computed_as_whole_vectors() -> None:
    graph, known, _ = MADE["short rows"]
    first = back.candidates(_kernel(graph, known), known)[0]
    (axis,) = first.vectors
    assert axis == "i1" and first.block(axis) == 4
    text = back.render(_kernel(graph, known), first)
    assert "i0" not in text and "lanes(b0 + (i1))" in text


@pytest.mark.parametrize("name", CASES)
def test_joined_axes_keep_every_element(name: str) -> None:
    """Each store of a joined kernel walks over as many places as before."""
    graph, known = CASES[name]()
    cut = partition(rewritten(lowered(graph)), known)
    for group in cut.groups:
        if group.library:
            continue
        kernel = cut.kernel(group)
        flat = flattened(kernel)

        def volume(one: Kernel) -> int:
            total = 1
            for axis in one.axes:
                size = one.extents[axis]
                total *= size if isinstance(size, int) else size.at(known)
            return total

        assert volume(flat) == volume(kernel) and flat.buffers == kernel.buffers
