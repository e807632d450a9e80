"""GET /v1/graphs: the choices made by measurement on this machine so far."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter

from anytorch.measured.store import verdicts
from anytorch.measured.verdict import Verdict
from anytorch.serve import schemas
from anytorch.serve.answers import problems

router = APIRouter(tags=["devices"])


@router.get("/v1/graphs", responses=problems(401))
async def graphs() -> schemas.Graphs:
    """Kernels and layouts that were measured against each other, with what was chosen. An empty list is a normal answer."""
    return schemas.Graphs(graphs=await asyncio.to_thread(tuned))


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
                name=one.name,
                seconds=one.seconds,
                correct=not one.wrong,
                chosen=one.name == found.chosen,
            )
            for one in found.trials
        ],
        speedup=round(found.speedup, 2) if found.speedup else None,
        when=found.when,
    )
