"""POST /v1/benchmark, which streams what it measures, and GET /v1/benchmark/runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response

from anytorch.serve import benchmarks, schemas
from anytorch.serve.limits import JsonRoute
from anytorch.serve.problems import EVENT_STREAM, event, event_stream, problems
from anytorch.serve.state import Service

router = APIRouter(tags=["benchmark"], route_class=JsonRoute)
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}, "description": "events: progress, result, done"}
}


@router.post("/v1/benchmark", response_class=Response, responses={**EVENTS, **problems(401, 409, 422)})
async def benchmark(asked: schemas.BenchmarkRequest, service: Service) -> Response:
    """Measure devices, and stream it as server-sent events.

    `progress` {device, test, fraction, message}, `result` {device, test, rate, unit, limit, share}, `problem`
    {device, test, message}, at the end `done` {run_id, rows} or `failed` {message}. Closing the connection ends it.
    """
    await asyncio.to_thread(benchmarks.check, asked)
    service.benchmarks.reserve()

    async def events() -> AsyncIterator[bytes]:
        async for name, data in service.benchmarks.run(asked):
            yield event(data, name)

    return event_stream(events())


@router.get("/v1/benchmark/runs", responses=problems(401))
async def runs() -> schemas.BenchmarkRuns:
    """Earlier runs, newest first."""
    return schemas.BenchmarkRuns(runs=await asyncio.to_thread(benchmarks.earlier))
