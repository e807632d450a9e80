"""A plan in words (`explain`) and as a picture (`draw`): who works when, and how full each level is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.counts import counted
from anytorch.errors import UsageError
from anytorch.files import replace_file
from anytorch.memory.sizes import words

if TYPE_CHECKING:
    from anytorch.memory.types import Home, TierPlan

LIMIT_HINTS = {
    "computing": "the streaming is hidden behind computing",
    "host link": "more device memory, fewer bits per weight, or more tokens per pass would help, in this order",
    "disk": "more memory, fewer bits per weight, or more tokens per pass would help, in this order",
    "nothing": "no speeds are known",
}


def explain(plan: TierPlan) -> str:
    """Several lines for a person. Figures that are not known are left out rather than guessed."""
    prediction = plan.prediction
    lines = [
        f"{counted(len(plan.blocks), 'block')}, {words(plan.total_nbytes)}, {counted(len(plan.steps), 'step')} per pass"
    ]
    lines.append(_device(plan))
    if plan.budgets.host is not None:
        lines.append(_host(plan))
    on_disk = plan.nbytes_at("disk")
    if on_disk:
        lines.append(f"disk:   {words(on_disk)} rest there in {_blocks(plan, 'disk')}")
    streamed = prediction.from_host_nbytes + prediction.from_disk_nbytes
    if not streamed:
        lines.append("everything is resident: nothing streams")
    else:
        parts = []
        if prediction.from_host_nbytes:
            parts.append(f"{words(prediction.from_host_nbytes)} from host memory" + _at(plan.speeds.host_gb_per_s))
        if prediction.from_disk_nbytes:
            parts.append(f"{words(prediction.from_disk_nbytes)} from disk" + _at(plan.speeds.disk_gb_per_s))
        lines.append("streams per pass: " + ", ".join(parts))
    if prediction.pass_s > 0:
        computed = any(step.compute_s for step in plan.steps)
        what = "one pass" if computed else "moving the blocks of one pass"
        lines.append(f"predicted: {what} takes {seconds(prediction.pass_s)}, limited by {prediction.limit}")
        if prediction.limit in LIMIT_HINTS:
            lines.append(f"           {LIMIT_HINTS[prediction.limit]}")
    return "\n".join(lines)


def seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _device(plan: TierPlan) -> str:
    line = f"device: {words(plan.nbytes_at('device'))} resident in {_blocks(plan, 'device')}"
    if plan.ring_nbytes:
        line += f", a ring of {words(plan.ring_nbytes)} for the others"
    return line + f"; {words(plan.device_nbytes)} of {words(plan.budgets.device)} used"


def _host(plan: TierPlan) -> str:
    assert plan.budgets.host is not None
    line = f"host:   {words(plan.nbytes_at('host'))} rest there in {_blocks(plan, 'host')}"
    if plan.staging_nbytes:
        line += f", {words(plan.staging_nbytes)} of buffers for the disk"
    return line + f"; {words(plan.host_nbytes)} of {words(plan.budgets.host)} used"


def _blocks(plan: TierPlan, home: Home) -> str:
    return counted(sum(place == home for place in plan.homes.values()), "block")


def _at(gb_per_s: float | None) -> str:
    return f" at {gb_per_s:.3g} GB/s" if gb_per_s else ""


LANES = {"disk": "disk reads", "link": "copies to the device", "compute": "computing"}
COLOURS = {"disk": "#b8860b", "link": "#1f77b4", "compute": "#2e8b57"}


def draw(plan: TierPlan, path: str) -> str:
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


def _lanes(plan: TierPlan, axes: Any) -> None:
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


def _levels(plan: TierPlan, axes: Any) -> None:
    """One bar per level: what rests there, the ring or the staging buffers, and the budget as a line."""
    rows = [("device", plan.nbytes_at("device"), plan.ring_nbytes, plan.budgets.device)]
    if plan.budgets.host is not None:
        rows.append(("host", plan.nbytes_at("host"), plan.staging_nbytes, plan.budgets.host))
    if plan.nbytes_at("disk"):
        rows.append(("disk", plan.nbytes_at("disk"), 0, 0))
    gib = 2**30
    for row, (_, resident, passing, budget) in enumerate(rows):
        axes.barh(row, resident / gib, color="#4c72b0", label="resting" if row == 0 else None)
        axes.barh(row, passing / gib, left=resident / gib, color="#dd8452", label="passing" if row == 0 else None)
        if budget:
            axes.plot([budget / gib] * 2, [row - 0.4, row + 0.4], color="black", linewidth=2)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GiB (black line: the budget)")
    axes.legend(loc="lower right")
