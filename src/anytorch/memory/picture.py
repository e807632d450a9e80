"""A plan as a picture: who works when, and how full each level is, over one pass."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.errors import UsageError
from anytorch.files import replace_file
from anytorch.memory.sizes import words

if TYPE_CHECKING:
    from anytorch.memory.types import Plan

LANES = {"disk": "disk reads", "link": "copies to the device", "compute": "computing"}
COLOURS = {"disk": "#b8860b", "link": "#1f77b4", "compute": "#2e8b57"}


def draw(plan: Plan, path: str) -> str:
    """Write the picture to a .png or .svg file and return its path. Needs matplotlib."""
    if not path.lower().endswith((".png", ".svg")):
        raise UsageError(f"cannot draw to {path!r}: the name must end in .png or .svg")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise UsageError("a picture needs matplotlib, which is not installed", hint="pip install matplotlib") from exc
    figure = Figure(figsize=(9, 5), layout="constrained")
    lanes, levels = figure.subplots(2, 1, height_ratios=[3, 2])
    _lanes(plan, lanes)
    _levels(plan, levels)
    body = io.BytesIO()
    figure.savefig(body, format=path[-3:].lower(), dpi=120)
    replace_file(Path(path), body.getvalue())
    return path


def _lanes(plan: Plan, axes: Any) -> None:
    kinds = [kind for kind in LANES if any(event.kind == kind for event in plan.prediction.timeline)]
    scale, unit = (1e3, "ms") if plan.prediction.pass_s < 1 else (1.0, "s")
    for event in plan.prediction.timeline:
        row = kinds.index(event.kind)
        start = max(0.0, event.start_s) * scale
        width = min(event.end_s, plan.prediction.pass_s) * scale - start
        if width > 0:
            axes.broken_barh([(start, width)], (row - 0.35, 0.7), facecolor=COLOURS[event.kind], edgecolor="white")
    axes.set_yticks(range(len(kinds)), [LANES[kind] for kind in kinds])
    axes.set_xlim(0, max(plan.prediction.pass_s * scale, 1e-9))
    axes.set_xlabel(f"one pass in the steady state ({unit}); limited by {plan.prediction.limit}")
    axes.set_title(f"{words(plan.total_nbytes)} within {words(plan.budgets.device)} of device memory")


def _levels(plan: Plan, axes: Any) -> None:
    """One bar per level: what rests there, the ring or the staging buffers, and the budget as a line."""
    rows = [("device", plan.nbytes_at("device"), plan.ring_nbytes, plan.budgets.device)]
    if plan.budgets.host is not None:
        rows.append(("host", plan.nbytes_at("host"), plan.staging_nbytes, plan.budgets.host))
    if plan.nbytes_at("disk"):
        rows.append(("disk", plan.nbytes_at("disk"), 0, 0))
    gigabyte = 2**30
    for row, (_, resident, passing, budget) in enumerate(rows):
        axes.barh(row, resident / gigabyte, color="#4c72b0", label="resting" if row == 0 else None)
        axes.barh(
            row, passing / gigabyte, left=resident / gigabyte, color="#dd8452", label="passing" if row == 0 else None
        )
        if budget:
            axes.plot([budget / gigabyte] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GiB (black line: the budget)")
    axes.legend(loc="lower right")
