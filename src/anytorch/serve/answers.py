"""Answers that end points write themselves, with orjson: large ones, and streams of events."""

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
    """NaN and infinities become null, which is what JSON has for them."""
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
    """For a route's `responses`: the problem documents it may answer with."""
    return {
        status: {"content": {"application/problem+json": {"schema": PROBLEM}}, "description": WORDS[status]}
        for status in statuses
    }


PROBLEM = {"$ref": "#/components/schemas/Problem"}
WORDS = {
    400: "the body is not what it says it is",
    401: "an API key is needed",
    403: "not from this origin",
    404: "there is no such model",
    409: "one is under way",
    413: "too large",
    415: "a kind of body that is not taken",
    422: "the input cannot be used; `detail` says which part",
    429: "too many are waiting; try again after Retry-After seconds",
    503: "not now",
    504: "the deadline passed",
}
__all__ = ["event", "event_stream", "json_answer", "problems", "schemas"]
