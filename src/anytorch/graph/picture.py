"""A kernel graph as SVG: boxes for nodes in the order they are computed, a colour for every kernel that was chosen."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from anytorch.graph.ir import Graph, Node
from anytorch.graph.placing import Placed, placed
from anytorch.graph.sizes import words

if TYPE_CHECKING:
    from anytorch.graph.program import Program

WIDTH, HEIGHT, GAP, MARGIN = 168, 44, 30, 20  # a box is wider than WIDTH where its words are
COLOURS = ("#d7e8ff", "#ffe3cc", "#d9f2d9", "#f3d9f2", "#fff3bf", "#d0f0f0", "#f9d6d6", "#e3dcf7")
PLAIN, INPUT = "#f4f4f4", "#ffffff"


def draw(graph: Graph, program: Program | None) -> str:
    """SVG text of the graph, or of the program that was found for it: its own graph, kernel by kernel."""
    shown = program.partition.graph if program is not None else graph
    groups: dict[int, tuple[int, str]] = {}
    legend: list[tuple[str, str]] = []
    for number, step in enumerate(program.steps if program is not None else ()):
        colour = PLAIN if not step.ours else COLOURS[number % len(COLOURS)]
        for member in step.group.nodes:
            groups[member] = (number, colour)
        said = step.schedule if step.ours else "torch"
        legend.append((colour, f"{number}: {said}"))
    # Numbers that are constants are left out.
    drawn = {number: node for number, node in shown if node.op != "constant"}
    reads = {number: [arg for arg in node.args if arg in drawn] for number, node in drawn.items()}
    words_of = {number: (_title(node), f"{node.dtype} {words(node.shape)}") for number, node in drawn.items()}
    longest = max((len(text) for both in words_of.values() for text in both), default=0)
    places = placed(reads, max(WIDTH, 7 * longest + 16))
    rows = max(places.rows.values(), default=0) + 1
    tall = MARGIN * 2 + rows * (HEIGHT + GAP) - GAP + 18 * len(legend)
    wide = MARGIN * 2 + max([places.wide, *(7 * len(text) for _, text in legend)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall}" width="{wide:g}" height="{tall}" '
        'font-family="ui-monospace, monospace" font-size="11">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#666"/></marker></defs>',
    ]
    for number, args in reads.items():
        for arg in dict.fromkeys(args):
            line = _line(places, arg, number)
            parts.append(f'<path d="{line}" stroke="#999" fill="none" marker-end="url(#a)"/>')
    for number, node in drawn.items():
        row = places.rows[number]
        x, y = places.x[number, row] - places.box / 2 + MARGIN, _top(row)
        fill = INPUT if node.op == "input" else groups.get(number, (0, PLAIN))[1]
        border = "2" if number in shown.outputs else "1"
        title, kind = words_of[number]
        parts.append(
            f'<g><title>{escape(str(node))}</title><rect x="{x:g}" y="{y}" width="{places.box:g}" height="{HEIGHT}" rx="5" '
            f'fill="{fill}" stroke="#444" stroke-width="{border}"/>'
            f'<text x="{x + 8:g}" y="{y + 18}" font-weight="600">{escape(title)}</text>'
            f'<text x="{x + 8:g}" y="{y + 34}" fill="#555">{escape(kind)}</text></g>'
        )
    top = tall - MARGIN - 18 * len(legend) + 14
    for place, (colour, text) in enumerate(legend):
        y = top + 18 * place
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="12" height="12" fill="{colour}" stroke="#444"/>')
        parts.append(f'<text x="{MARGIN + 18}" y="{y + 10}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _title(node: Node) -> str:
    if node.op == "input":
        return f"input {node['index']}"
    if node.op == "handwritten":
        return str(node["kernel"])
    return f"{node['how']} over {words(node['dims'])}" if node.op == "reduce" else node.op


def _top(row: int) -> int:
    return MARGIN + row * (HEIGHT + GAP)


def _line(places: Placed, source: int, reader: int) -> str:
    """From the middle of a box's lower side to that of another's upper side, straight down wherever it passes a row."""
    first, *between, last = places.way(source, reader)
    said = [f"M{places.x[first] + MARGIN:g} {_top(first[1]) + HEIGHT}"]
    for place in between:
        said.append(f"L{places.x[place] + MARGIN:g} {_top(place[1])} V{_top(place[1]) + HEIGHT}")
    return " ".join([*said, f"L{places.x[last] + MARGIN:g} {_top(last[1])}"])
