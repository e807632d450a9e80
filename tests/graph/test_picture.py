"""Pictures of graphs: what is drawn, and that no line passes through a box that is not its end."""

from __future__ import annotations

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from anytorch.graph import new_kernel_graph
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.lower import lowered
from anytorch.graph.partition import partition
from anytorch.graph.picture import draw
from anytorch.graph.placing import placed
from anytorch.graph.program import Program, Step
from anytorch.graph.rewrite import rewritten
from tests.graph.cases import CASES

BENCH = Path(__file__).parents[2] / "bench"
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


def _decoder_block(monkeypatch: pytest.MonkeyPatch) -> Graph:
    """The one that bench/graphs.py measures."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_graphs", BENCH / "graphs.py")
    assert spec is not None and spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_graphs", bench)  # its dataclasses look there for their types
    spec.loader.exec_module(bench)
    (case,) = [one for one in bench.cases([8], small=False) if one.name.startswith("decoder block")]
    g = new_kernel_graph()
    g.mark_output(case.build(g, [g.new_input(shape, dtype="float32") for shape in case.shapes]))
    return g.graph


def _program(graph: Graph, known: dict[str, int]) -> Program:
    """As a search finds one, without anything compiled."""
    cut = partition(rewritten(lowered(graph)), known)
    return Program(cut, [Step(group, None if group.library else cut.kernel(group)) for group in cut.groups])


def _boxes(svg: str) -> list[Box]:
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="(\d+)" height="44"', svg)
    return [(float(x), float(y), float(x) + float(width), float(y) + 44) for x, y, width in found]


def _lines(svg: str) -> list[list[Point]]:
    found = []
    for text in re.findall(r'<path d="(M[^"z]*)" stroke="#999"', svg):
        points: list[Point] = []
        for letter, numbers in re.findall(r"([MLV])([^MLV]*)", text):
            at = [float(number) for number in numbers.split()]
            points.append((points[-1][0], at[0]) if letter == "V" else (at[0], at[1]))
        found.append(points)
    return found


def _passes(first: Point, second: Point, box: Box) -> bool:
    """Does the line between two points have a point inside of the box? (Its sides are outside.)"""
    begin, end = 0.0, 1.0
    for one, other, low, high in ((first[0], second[0], box[0], box[2]), (first[1], second[1], box[1], box[3])):
        step = other - one
        if not step:
            if not low < one < high:
                return False
            continue
        at = sorted(((low - one) / step, (high - one) / step))
        begin, end = max(begin, at[0]), min(end, at[1])
    return end - begin > 1e-9


def _checked(svg: str) -> int:
    """How many lines there are, none of which passes through a box; each begins below one and ends above one."""
    boxes, lines = _boxes(svg), _lines(svg)
    width, height = (float(one) for one in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    assert all(box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= height for box in boxes)
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1], "boxes overlap"
    for points in lines:
        (x, y), (to_x, to_y) = points[0], points[-1]
        assert any(box[3] == y and abs((box[0] + box[2]) / 2 - x) < 0.2 for box in boxes)
        assert any(box[1] == to_y and abs((box[0] + box[2]) / 2 - to_x) < 0.2 for box in boxes)
        assert all(first[1] < second[1] for first, second in pairwise(points))  # down, always
        crossed = [box for box in boxes for pair in pairwise(points) if _passes(*pair, box)]
        assert not crossed, (points, crossed)
    return len(lines)


def test_the_check_sees_a_line_through_a_box() -> None:
    box = (0.0, 0.0, 10.0, 10.0)
    assert _passes((5, -5), (5, 20), box) and _passes((-5, 5), (20, 6), box) and _passes((5, 5), (5, 20), box)
    assert not _passes((5, -5), (5, 0), box) and not _passes((10, -5), (10, 20), box)
    assert not _passes((-5, 0), (20, 0), box) and not _passes((11, -5), (20, 5), box)


def test_no_line_of_a_decoder_block_passes_through_a_box(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _decoder_block(monkeypatch)
    reads = sum(len(set(node.args)) for _, node in graph)
    assert _checked(draw(graph, None)) == reads > 15
    program = _program(graph, {})
    assert len(program.steps) > 2 and _checked(draw(graph, program)) > 30


@pytest.mark.parametrize("name", CASES)
def test_no_line_passes_through_a_box(name: str) -> None:
    graph, known = CASES[name]()
    assert _checked(draw(graph, None)) and _checked(draw(graph, _program(graph, known)))


def test_long_lines_run_beside_the_boxes_they_pass() -> None:
    b = Builder()
    x, y = b.input((4, 8), "float32"), b.input((4, 8), "float32")
    made = b.add("exp", b.add("add", x, y))
    for _ in range(4):
        made = b.add("silu", made)
    graph = b.graph([b.add("mul", b.add("sub", made, x), b.add("add", made, y))])
    assert _checked(draw(graph, None)) == 13
    assert max(len(points) for points in _lines(draw(graph, None))) == 2 + 2 * 6


def test_places_of_nothing_of_one_and_of_what_reads_twice() -> None:
    assert placed({}, 100).wide == 0 and not placed({}, 100).rows
    assert placed({7: []}, 100).rows == {7: 0}
    found = placed({0: [], 1: [0, 0], 2: [], 3: [1, 2]}, 100)
    assert found.rows == {0: 0, 1: 1, 2: 1, 3: 2}  # what reads nothing stands just above who reads it
    assert found.way(0, 1) == [(0, 0), (1, 1)]


def test_words_fit_into_their_boxes() -> None:
    b = Builder()
    (box,) = _boxes(draw(b.graph([b.input((1000, 1000, 1000, 1000, 1000), "bfloat16")]), None))
    assert box[2] - box[0] >= 7 * len("bfloat16 [1000, 1000, 1000, 1000, 1000]")


def test_constants_are_left_out_and_words_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    b: Any = Builder()
    x = b.input((4,), "float32", name="<x>")
    svg = draw(b.graph([b.add("mul", x, b.constant(2.0, "float32"))]), None)
    assert len(_boxes(svg)) == 2 and "<x>" not in svg and "&lt;x&gt;" in svg
