"""`create_app`: the ASGI application, put together. Nothing is loaded before its lifespan starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from anytorch._version import __version__
from anytorch.errors import AnytorchError
from anytorch.serve import page
from anytorch.serve.keys import read_keys
from anytorch.serve.limits import Guard
from anytorch.serve.metrics import Metrics
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem, problem_of, unexpected, validation_problem
from anytorch.serve.routes import devices, docs, embeddings, forecast, generate, health
from anytorch.serve.routes.docs import document
from anytorch.serve.state import State

ROUTERS = (
    *(health.router, health.models, devices.router, embeddings.router, forecast.router, generate.router),
    *(devices.measuring, docs.router),
)


class Service(FastAPI):
    """FastAPI behind our own guard, which also calls the hot end points without going through its routing."""

    guard: Guard

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            self.openapi_schema = document(self, keys=self.guard.keys is not None)
        return self.openapi_schema

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.guard(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def unguarded(self, scope: Any, receive: Any, send: Any) -> None:
        await super().__call__(scope, receive, send)


def create_app(options: ServeOptions | None = None, *, routers: Sequence[APIRouter] = ()) -> Service:
    """The service as an ASGI app. Raises UsageError or ModelError for options that cannot work.

    `routers` come before its own: their end points take the places of ours, behind the same keys and limits.

    >>> from anytorch.serve.app import create_app
    >>> create_app().title
    'anytorch'
    """
    options = options or ServeOptions()
    metrics = Metrics(None if options.run_folder is None else options.run_folder / "metrics")
    state = State(options, metrics)
    metrics.watch(state.look)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        try:
            yield
        finally:
            await state.stop()

    app = Service(
        title="anytorch", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        openapi_url="/openapi.json", separate_input_output_schemas=False,
    )  # fmt: skip
    app.state.service = state
    app.state.page = page.read_page() if options.page else {}
    for router in (*routers, *ROUTERS, page.router):
        app.include_router(router)
    for kind in (Problem, AnytorchError, HTTPException, RequestValidationError, TimeoutError, Exception):
        app.add_exception_handler(kind, passed_on)
    hot = embeddings.Embeddings(state.models, options, metrics, state.pools)
    listed = [route.path for router in (*routers, *ROUTERS) for route in router.routes if isinstance(route, Route)]
    routes = frozenset({*listed, "/", "/openapi.json", embeddings.PATH})
    keys = None if options.api_key_file is None else read_keys(options.api_key_file)
    app.guard = Guard(app.unguarded, {("POST", embeddings.PATH): hot}, routes, options, keys, metrics)
    hot.guard = state.guard = app.guard
    return app


async def passed_on(request: Request, exc: Exception) -> Response:
    """Turn an end point's exception into a problem document."""
    problem = problem_of(exc)
    if isinstance(exc, RequestValidationError):
        problem = validation_problem(exc.errors())
    elif isinstance(exc, HTTPException):
        problem = Problem(
            exc.status_code, {404: "not-found", 405: "method-not-allowed"}.get(exc.status_code, "refused"),
            str(exc.detail), headers=dict(exc.headers or {}),
            hint="GET /docs lists the end points" if exc.status_code in (404, 405) else "",
        )  # fmt: skip
    elif problem is None:
        problem = unexpected(exc, f"{request.method} {request.url.path}")
    if problem.refuses:
        request.app.state.service.metrics.rejected(problem.code)
    body = problem.body(request.url.path)
    response = Response(body, problem.status, media_type="application/problem+json")
    for name, value in problem.headers.items():
        response.headers[name] = value
    return response
