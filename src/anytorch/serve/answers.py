"""Responses that end points write with orjson: large ones, and streams of events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
from fastapi import Response
from starlette.responses import StreamingResponse

from anytorch.serve import schemas

OPTIONS = orjson.OPT_SERIALIZE_NUMPY
EVENT_STREAM = "text/event-stream"


def json_answer(document: Any) -> Response:
    """A JSON response of a value; NaN and infinities become null."""
    return Response(orjson.dumps(document, option=OPTIONS), media_type="application/json")


def event(data: Any, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + (data if isinstance(data, bytes) else orjson.dumps(data)) + b"\n\n"


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    # A proxy that collects the events before it sends them would make the stream useless.
    return StreamingResponse(
        events, media_type=EVENT_STREAM, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problem documents for a route's `responses`."""
    return {
        status: {"content": {"application/problem+json": {"schema": PROBLEM}}, "description": WORDS[status]}
        for status in statuses
    }


PROBLEM = {"$ref": "#/components/schemas/Problem"}
WORDS = {
    400: "the body does not match its content type",
    401: "an API key is required",
    403: "requests from this origin are not allowed",
    404: "unknown model",
    409: "one is already running",
    413: "too large",
    415: "unsupported content type",
    422: "invalid input; `detail` says which part",
    429: "the queue is full; try again after Retry-After seconds",
    503: "not available now",
    504: "the deadline passed",
}
__all__ = ["event", "event_stream", "json_answer", "problems", "schemas"]
