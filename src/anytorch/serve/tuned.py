"""The choices measured on this machine, from the store of verdicts, in the HTTP interface's shape."""

from __future__ import annotations

from anytorch.measured.store import verdicts
from anytorch.measured.verdict import Verdict
from anytorch.serve import schemas


def tuned() -> list[schemas.Graph]:
    """Every remembered choice, the newest first."""
    return [graph_of(found) for found in verdicts()]


def graph_of(found: Verdict) -> schemas.Graph:
    question = found.question
    return schemas.Graph(
        id=question.key,
        title=question.title,
        device=question.device,
        kind=question.kind,
        candidates=[
            schemas.Candidate(
                name=one.name, seconds=one.seconds, correct=not one.wrong, chosen=one.name == found.chosen
            )
            for one in found.trials
        ],
        speedup=round(found.speedup, 2) if found.speedup else None,
        when=found.when,
    )
