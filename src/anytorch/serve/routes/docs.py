"""The OpenAPI document, and GET /docs: it as a plain page made here. FastAPI's own loads its scripts from a CDN."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from anytorch.serve import schemas
from anytorch.serve.page import POLICY
from anytorch.serve.problems import problems
from anytorch.serve.routes import embeddings

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> Response:
    return Response(
        page_of(request.app.openapi()),
        media_type="text/html; charset=utf-8",
        headers={"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"},
    )


def page_of(document: dict[str, Any]) -> str:
    """The OpenAPI document as a page: every end point with its fields and answers. No script."""
    parts = []
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            parts.append(end_point(path, method, about, document))
    title = escape(f"{document['info']['title']} {document['info']['version']}: the API")
    return PAGE.format(title=title, end_points="\n".join(parts))


PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>{title}</title>
  <link rel="stylesheet" href="web/styles/colours.css">
  <link rel="stylesheet" href="web/styles/base.css">
  <link rel="stylesheet" href="web/styles/docs.css">
</head>
<body class="docs">
  <main id="content">
    <h1>{title}</h1>
    <p>The same for programs: <a href="openapi.json">openapi.json</a>. Errors are <code>application/problem+json</code>.
      Everything can be tried on the <a href="./">start page</a>.</p>
    {end_points}
  </main>
</body>
</html>
"""


def end_point(path: str, method: str, about: dict[str, Any], document: dict[str, Any]) -> str:
    words = escape(about.get("description") or about.get("summary") or "").replace("\n\n", "<br>")
    title = f"{method.upper()} {path}"
    rows = fields(about, document)
    table = (
        "<table><thead><tr><th>field</th><th>type</th><th>about</th></tr></thead><tbody>"
        + "".join(f"<tr><td><code>{a}</code></td><td>{b}</td><td>{c}</td></tr>" for a, b, c in rows)
        + "</tbody></table>"
        if rows
        else ""
    )
    answers = ", ".join(
        f"<code>{escape(status)}</code> {escape(answer.get('description', ''))}"
        for status, answer in about["responses"].items()
    )
    return (
        f'<section><h2 id="{escape(method)}{escape(path.replace("/", "-"))}"><code>{escape(title)}</code></h2>'
        f"<p>{words}</p>{table}<p>answers: {answers}</p></section>"
    )


def fields(about: dict[str, Any], document: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [
        (escape(one["name"]), escape(kind_of(one.get("schema", {}))), escape(f"in the {one['in']}"))
        for one in about.get("parameters", [])
    ]
    content = about.get("requestBody", {}).get("content", {})
    schema = resolved(content.get("application/json", {}).get("schema", {}), document)
    needed = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        said = field.get("description", "")
        default = f" (default: {field['default']})" if field.get("default") is not None else ""
        rows.append((escape(name) + ("*" if name in needed else ""), escape(kind_of(field)), escape(said + default)))
    return rows


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: dict[str, Any] = document.get("components", {}).get("schemas", {}).get(name, schema)
    return found


def kind_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(kind_of(one) for one in schema["anyOf"] if one.get("type") != "null")
    if schema.get("type") == "array":
        return f"[{kind_of(schema.get('items', {}))}]"
    return str(schema.get("type", "any"))


# --- the OpenAPI document: FastAPI's, and what it cannot know: the hot end points, problems, keys ---------------------

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
