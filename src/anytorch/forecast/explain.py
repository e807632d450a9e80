"""Describe in words what a predictor does and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.forecast.kernels.choice import Choice


def explained(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['parameters'] / 1e6:,.1f} million parameters in {facts['dtype']} on {facts['device']} ({facts['why']})",
        f"windows of {facts['max_context']} rows; steps are "
        + ("recorded once and replayed" if facts["recorded"] else "computed one after the other"),
        *part("a step of growing windows", facts["step"], "our kernels"),
        *part("the products of full windows", facts["windows"], "our kernels where they are faster"),
    ]
    return "\n".join(lines)


def part(name: str, known: tuple[str | None, Sequence[Choice]] | None, ours: str) -> list[str]:
    """`known` is (why torch computes it, what was chosen): "" for our kernels, None while there is no answer."""
    if known is None:
        return []
    why, choices = known
    if why is None:
        return [f"{name}: torch's kernels; ours are compiled beside the next forecasts of the same shape"]
    return [f"{name}: " + (f"torch's kernels ({why})" if why else ours), *(f"  {choice}" for choice in choices)]
