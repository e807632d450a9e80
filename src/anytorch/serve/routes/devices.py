"""GET /v1/devices, /v1/devices/live, /v1/doctor, /v1/graphs: this machine's devices, and what was found out about them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from anytorch.devices.doctor import explain
from anytorch.errors import UsageError
from anytorch.measured.store import verdicts
from anytorch.measured.verdict import Verdict
from anytorch.serve import machine, schemas
from anytorch.serve.problems import Problem, problems
from anytorch.serve.state import Service

router = APIRouter(tags=["devices"])


@router.get("/v1/devices", responses=problems(401))
async def devices(service: Service, refresh: bool = False) -> schemas.Devices:
    """Every device, tried in a child process; for each missing or broken one, why and how to fix it."""
    found, tried = await service.surveys.survey(refresh=refresh)
    return await asyncio.to_thread(machine.devices_of, found, service.activity, tried)


@router.get("/v1/devices/live", responses=problems(401))
async def live(service: Service) -> schemas.LiveDevices:
    """Memory and utilisation, cheap enough to ask every second."""
    found, _ = await service.surveys.survey(fresh_s=3600)
    return await asyncio.to_thread(machine.live, found, service.activity)


@router.get("/v1/doctor", responses=problems(401))
async def doctor(service: Service, refresh: bool = False) -> schemas.Findings:
    """What is wrong on this machine, worst first, each with its fix."""
    found, tried = await service.surveys.survey(refresh=refresh)
    return schemas.Findings(findings=[machine.reason_of(reason) for reason in found.reasons], tried=tried)


@router.get(
    "/v1/doctor/{code}",
    response_class=Response,
    responses={200: {"content": {"text/markdown": {"schema": {"type": "string"}}}}, **problems(401, 404)},
)
async def page(code: str) -> Response:
    """The page of one diagnosis, in Markdown."""
    try:
        return Response(explain(code), media_type="text/markdown; charset=utf-8")
    except UsageError as exc:
        raise Problem(404, "no-such-diagnosis", "Unknown diagnosis", exc.message, hint=exc.hint) from exc


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
