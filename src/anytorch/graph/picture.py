"""A kernel graph as SVG: boxes for nodes in the order they are computed, a colour for every kernel that was chosen."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from anytorch.graph.ir import Graph
from anytorch.graph.sizes import words

if TYPE_CHECKING:
    from anytorch.graph.program import Program

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 168, 44, 22, 30, 20
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
    places, columns, rows = _placed(shown)
    wide = MARGIN * 2 + columns * (WIDTH + GAP_X) - GAP_X
    tall = MARGIN * 2 + rows * (HEIGHT + GAP_Y) - GAP_Y + 18 * len(legend)
    wide = max(wide, MARGIN * 2 + max((7 * len(text) for _, text in legend), default=0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" '
        'font-family="ui-monospace, monospace" font-size="11">',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#666"/></marker></defs>',
    ]
    for number, node in shown:
        if number not in places:
            continue
        for arg in node.args:
            if arg in places:
                (x, y), (to_x, to_y) = places[arg], places[number]
                line = f"M{x + WIDTH / 2:g} {y + HEIGHT} L{to_x + WIDTH / 2:g} {to_y}"
                parts.append(f'<path d="{line}" stroke="#999" fill="none" marker-end="url(#a)"/>')
    for number, node in shown:
        if number not in places:
            continue
        x, y = places[number]
        fill = INPUT if node.op == "input" else groups.get(number, (0, PLAIN))[1]
        border = "2" if number in shown.outputs else "1"
        title = node.op
        if node.op == "input":
            title = f"input {node['index']}"
        elif node.op == "reduce":
            title = f"{node['how']} over {words(node['dims'])}"
        elif node.op == "handwritten":
            title = node["kernel"]
        parts.append(
            f'<g><title>{escape(str(node))}</title><rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
            f'fill="{fill}" stroke="#444" stroke-width="{border}"/>'
            f'<text x="{x + 8}" y="{y + 18}" font-weight="600">{escape(title)}</text>'
            f'<text x="{x + 8}" y="{y + 34}" fill="#555">{escape(node.dtype)} {escape(words(node.shape))}</text></g>'
        )
    top = tall - MARGIN - 18 * len(legend) + 14
    for place, (colour, text) in enumerate(legend):
        y = top + 18 * place
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="12" height="12" fill="{colour}" stroke="#444"/>')
        parts.append(f'<text x="{MARGIN + 18}" y="{y + 10}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _placed(graph: Graph) -> tuple[dict[int, tuple[int, int]], int, int]:
    """Where each node stands: below all that it reads. Numbers that are constants are left out."""
    depth: dict[int, int] = {}
    for number, node in graph:
        if node.op != "constant":
            depth[number] = 1 + max((depth[arg] for arg in node.args if arg in depth), default=-1)
    filled: dict[int, int] = {}
    places = {}
    for number, row in depth.items():
        column = filled.get(row, 0)
        filled[row] = column + 1
        places[number] = (MARGIN + column * (WIDTH + GAP_X), MARGIN + row * (HEIGHT + GAP_Y))
    return places, max(filled.values(), default=1), max(depth.values(), default=0) + 1
