"""A plan in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.counts import counted
from anytorch.memory.sizes import words

if TYPE_CHECKING:
    from anytorch.memory.types import Home, Plan

LIMIT_HINTS = {
    "computing": "the streaming is hidden behind computing",
    "host link": "more device memory, fewer bits per weight, or more tokens per pass would help, in this order",
    "disk": "more memory, fewer bits per weight, or more tokens per pass would help, in this order",
    "nothing": "no speeds are known",
}


def explain(plan: Plan) -> str:
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


def _device(plan: Plan) -> str:
    line = f"device: {words(plan.nbytes_at('device'))} resident in {_blocks(plan, 'device')}"
    if plan.ring_nbytes:
        line += f", a ring of {words(plan.ring_nbytes)} for the others"
    return line + f"; {words(plan.device_nbytes)} of {words(plan.budgets.device)} used"


def _host(plan: Plan) -> str:
    assert plan.budgets.host is not None
    line = f"host:   {words(plan.nbytes_at('host'))} rest there in {_blocks(plan, 'host')}"
    if plan.staging_nbytes:
        line += f", {words(plan.staging_nbytes)} of buffers for the disk"
    return line + f"; {words(plan.host_nbytes)} of {words(plan.budgets.host)} used"


def _blocks(plan: Plan, home: Home) -> str:
    return counted(sum(place == home for place in plan.homes.values()), "block")


def _at(gb_per_s: float | None) -> str:
    return f" at {gb_per_s:.3g} GB/s" if gb_per_s else ""
