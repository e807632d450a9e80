"""GET /v1/devices, /v1/devices/live, /v1/doctor: this machine's devices, their load, and the doctor's findings."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from anytorch.devices.doctor import explain
from anytorch.errors import UsageError
from anytorch.serve import machine, schemas
from anytorch.serve.answers import problems
from anytorch.serve.problems import Problem
from anytorch.serve.state import State

router = APIRouter(tags=["devices"])


@router.get("/v1/devices", responses=problems(401))
async def devices(request: Request, refresh: bool = False) -> schemas.Devices:
    """Every device, tried in a child process; for each missing or broken one, why and how to fix it."""
    service: State = request.app.state.service
    found, tried = await service.surveys.survey(refresh=refresh)
    return await asyncio.to_thread(machine.devices_of, found, service.activity, tried)


@router.get("/v1/devices/live", responses=problems(401))
async def live(request: Request) -> schemas.LiveDevices:
    """Memory and utilisation, cheap enough to ask every second."""
    service: State = request.app.state.service
    found, _ = await service.surveys.survey(fresh_s=3600)
    return await asyncio.to_thread(machine.live, found, service.activity)


@router.get("/v1/doctor", responses=problems(401))
async def doctor(request: Request, refresh: bool = False) -> schemas.Findings:
    """What is wrong on this machine, worst first, each with its fix."""
    service: State = request.app.state.service
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
