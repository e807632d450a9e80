"""GET /metrics, for Prometheus."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from anytorch.serve.metrics import CONTENT_TYPE
from anytorch.serve.state import State

router = APIRouter(tags=["health"])


@router.get(
    "/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}, response_class=Response
)
async def metrics(request: Request) -> Response:
    """Requests, latencies, queues, batches, tokens and memory."""
    service: State = request.app.state.service
    return Response(await asyncio.to_thread(service.metrics.text), media_type=CONTENT_TYPE)
