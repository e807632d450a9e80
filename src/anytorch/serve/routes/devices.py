"""/v1/devices, /v1/doctor, /v1/graphs and /v1/benchmark: this machine's devices, and what is found out about them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request, Response

from anytorch.devices.doctor import explain
from anytorch.errors import UsageError
from anytorch.serve import benchmarks, graphs, machine, schemas
from anytorch.serve.bodies import JsonRoute
from anytorch.serve.problems import EVENT_STREAM, LONGEST_NAME, Problem, event, event_stream, problems
from anytorch.serve.state import Service

T = TypeVar("T")
router = APIRouter(tags=["devices"])
measuring = APIRouter(tags=["benchmark"], route_class=JsonRoute)


async def asked_to_refresh(request: Request, refresh: bool = False) -> bool:
    """Whether the devices are to be tried anew. Raises a 403 Problem where a page of another site asks for that: its browser
    sends such a request without an Origin header, and says so in this one."""
    site = request.headers.get("sec-fetch-site", "same-origin").strip().lower()
    if refresh and site not in ("same-origin", "none") and not request.app.guard.allows(request.headers.get("origin")):
        raise Problem(
            403, "foreign-origin", "Origin not allowed", "a web page of another site may not have the devices tried again",
            hint="allow it with --allow-origin",
        )  # fmt: skip
    return refresh


Refresh = Annotated[bool, Depends(asked_to_refresh)]


@router.get("/v1/devices", responses=problems(401, 403))
async def devices(service: Service, refresh: Refresh) -> schemas.Devices:
    """Every device, tried in a child process; for each missing or broken one, why and how to fix it."""
    found, tried = await service.surveys.survey(refresh=refresh)
    return await service.pools.questions.run(machine.devices_of, found, service.activity, tried)


@router.get("/v1/devices/live", responses=problems(401))
async def live(service: Service) -> schemas.LiveDevices:
    """Memory and utilisation, cheap enough to ask every second."""
    found, _ = await service.surveys.survey(fresh_s=3600)
    return await service.pools.questions.run(machine.live, found, service.activity)


@router.get("/v1/doctor", responses=problems(401, 403))
async def doctor(service: Service, refresh: Refresh) -> schemas.Findings:
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
        raise Problem(404, "no-such-diagnosis", "Unknown diagnosis", exc.message[:200], hint=exc.hint) from exc


@router.get("/v1/graphs", responses=problems(401))
async def list_graphs(service: Service) -> schemas.Graphs:
    """Kernel graphs that were searched, and other kernels and layouts that were measured against each other, with what
    was chosen. An empty list is a normal answer."""
    return schemas.Graphs(graphs=await service.pools.questions.run(graphs.graphs))


@router.get("/v1/graphs/{key}", responses=problems(401, 404))
async def graph(key: str, service: Service) -> schemas.WholeGraph:
    """One of them in full: of a kernel graph also its form, its picture and the chosen kernels with their text."""
    return _found(await service.pools.questions.run(graphs.graph, _file_name(key)), key)


@router.get(
    "/v1/graphs/{key}/picture.svg",
    response_class=Response,
    responses={200: {"content": {"image/svg+xml": {"schema": {"type": "string"}}}}, **problems(401, 404)},
)
async def picture(key: str, service: Service) -> Response:
    """The picture of a kernel graph: its ops, with a colour for every kernel that was chosen."""
    drawn = _found(await service.pools.questions.run(graphs.picture, _file_name(key)), key)
    headers = {"Content-Security-Policy": "default-src 'none'; sandbox", "Cache-Control": "no-cache"}
    return Response(drawn, media_type="image/svg+xml", headers=headers)


def _file_name(key: str) -> str:
    """A key that can be one: they name files, and a longer one would only be a warning in the log."""
    if len(key) > LONGEST_NAME:
        _found(None, key)
    return key


def _found(answer: T | None, key: str) -> T:
    if answer is None:
        detail = f"There is no graph {key[:100]!r}, or it has no picture."
        raise Problem(404, "no-such-graph", "Unknown graph", detail, hint="GET /v1/graphs lists them with their ids")
    return answer


# --- measuring -------------------------------------------------------------------------------------------------------

EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}, "description": "events: progress, result, done"}
}


@measuring.post("/v1/benchmark", response_class=Response, responses={**EVENTS, **problems(401, 409, 422)})
async def benchmark(asked: schemas.BenchmarkRequest, service: Service) -> Response:
    """Measure devices, and stream it as server-sent events.

    `progress` {device, test, fraction, message}, `result` {device, test, rate, unit, limit, share}, `problem`
    {device, test, message}, at the end `done` {run_id, rows} or `failed` {message}. Closing the connection ends it, unless
    `keep_s` lets it wait for another reader.
    """
    await service.pools.questions.run(benchmarks.check, asked)
    service.benchmarks.reserve()

    async def events() -> AsyncIterator[bytes]:
        async for name, data in service.benchmarks.run(asked):
            yield event(data, name)

    return event_stream(events())


@measuring.get("/v1/benchmark/running", responses=problems(401))
async def running(service: Service) -> schemas.RunningBenchmark:
    """The benchmark that runs in this process, if one does."""
    return service.benchmarks.running


@measuring.delete("/v1/benchmark/running", status_code=204, response_class=Response, responses=problems(401))
async def stop_running(service: Service) -> Response:
    """End the benchmark that runs; what was measured so far is kept."""
    await service.benchmarks.stop()
    return Response(status_code=204)


@measuring.get("/v1/benchmark/running/events", response_class=Response, responses={**EVENTS, **problems(401, 404)})
async def follow_running(service: Service) -> Response:
    """The events of the benchmark that runs, from its first one on: what POST /v1/benchmark streams."""
    found = service.benchmarks.follow()

    async def events() -> AsyncIterator[bytes]:
        async for name, data in found:
            yield event(data, name)

    return event_stream(events())


@measuring.get("/v1/benchmark/runs", responses=problems(401))
async def runs(service: Service) -> schemas.BenchmarkRuns:
    """Earlier runs, newest first."""
    return schemas.BenchmarkRuns(runs=await service.pools.questions.run(benchmarks.earlier))
