"""Bodies and headers of requests, as far as they are read without a service around them."""

from __future__ import annotations

import orjson
from pydantic import ValidationError

from anytorch.serve import bodies, schemas, text_schemas
from anytorch.serve.limits import host_name
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.serve.routes import embeddings, forecast
from tests.fuzz.kit import target

REFUSED = (Problem, ValidationError, orjson.JSONDecodeError)
BODIES = (
    schemas.EmbeddingsRequest, schemas.SimilarityRequest, schemas.SearchRequest, schemas.ForecastRequest,
    text_schemas.CompletionRequest, text_schemas.ChatRequest, schemas.LoadModelRequest, schemas.BenchmarkRequest,
)  # fmt: skip


@target("bodies", "json", errors=(Problem, orjson.JSONDecodeError))
def request_bodies(data: bytes) -> None:
    """A body is valid for a schema, or refused, for each schema; what it opens is counted."""
    bodies.refuse_crowds(data, most=64)
    value = bodies.parse_json(data)
    assert bodies.opened(data) >= opened(value)
    for schema in BODIES:
        try:
            schema.model_validate(value)
        except ValidationError as exc:
            assert exc.errors(include_url=False, include_input=False, include_context=False)


def opened(value: object) -> int:
    """The lists and objects in a value; those that a name which comes twice has hidden are not among them."""
    left, count = [value], 0
    while left:
        one = left.pop()
        if isinstance(one, (list, dict)):
            count += 1
            left += one.values() if isinstance(one, dict) else one
    return count


@target("embeddings_body", "json", errors=(Problem,))
def embeddings_body(data: bytes) -> None:
    """A body of POST /v1/embeddings is texts or ids within the limits, or a Problem."""
    asked = embeddings.parse(data, ServeOptions())
    assert (asked.texts is None) != (asked.ids is None)


@target("forecast_body", "json", errors=REFUSED)
def forecast_body(data: bytes) -> None:
    """A body of POST /v1/forecast is checked before its table is read."""
    asked = schemas.ForecastRequest.model_validate(bodies.parse_json(data))
    forecast.check(asked, ServeOptions())
    if asked.csv:
        forecast.require_few_columns(asked.csv)


@target("host", "text", errors=(), words=("[::1]", "localhost", ":80", "@", ".", "evil.com", "[", "]", "\x85", "%"))
def host(data: bytes) -> None:
    """A Host header is a name without anything around it, or ""."""
    name = host_name(data)
    assert not set(name) & set("/@[]?# ") and (":" not in name or data.strip().startswith(b"["))


@target("upload", errors=(Problem,))
def upload(data: bytes) -> None:
    """An uploaded file is text, or refused."""
    assert isinstance(forecast.decode_upload(data), str)
