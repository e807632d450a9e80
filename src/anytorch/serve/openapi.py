"""The OpenAPI document: FastAPI's, and what it cannot know: the hot end points, problems, keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from anytorch.serve import schemas
from anytorch.serve.answers import problems
from anytorch.serve.routes import embeddings

DESCRIPTION = "Embeddings, forecasts and text on whatever hardware is there. Errors are application/problem+json."
WRITTEN = (schemas.EmbeddingsRequest, schemas.EmbeddingsAnswer, schemas.ForecastRequest, schemas.Problem)


def document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    made = get_openapi(
        title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes,
        separate_input_output_schemas=False,
    )  # fmt: skip
    known = made.setdefault("components", {}).setdefault("schemas", {})
    _, definitions = models_json_schema(
        [(model, "validation") for model in WRITTEN], ref_template="#/components/schemas/{model}"
    )
    known.update(definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        known.pop(name, None)
    made["paths"][embeddings.PATH] = {"post": EMBEDDINGS}
    for methods in made["paths"].values():
        for about in methods.values():
            about["responses"].setdefault("422", problems(422)[422])
            if "HTTPValidationError" in str(about["responses"]["422"]):
                about["responses"]["422"] = problems(422)[422]
            if keys:
                about["security"] = [{"bearer": []}]
    if keys:
        made["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return made


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


EMBEDDINGS: dict[str, Any] = {
    "tags": ["embeddings"],
    "summary": "Embeddings",
    "description": "Vectors of texts, compatible with OpenAI. Waiting requests are computed together.",
    "operationId": "embeddings",
    "requestBody": {"required": True, "content": {"application/json": {"schema": _ref("EmbeddingsRequest")}}},
    "responses": {
        "200": {
            "description": "one vector per text",
            "content": {"application/json": {"schema": _ref("EmbeddingsAnswer")}},
        },
        **{str(status): about for status, about in problems(400, 401, 404, 413, 422, 429, 503, 504).items()},
    },
}
