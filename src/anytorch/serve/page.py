"""The web page: its files, read once, with an ETag and a policy that lets the browser load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from anytorch.serve.problems import Problem

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
KINDS = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
    ".png": "image/png", ".ico": "image/x-icon",
    ".json": "application/json", ".webmanifest": "application/manifest+json",
    ".woff2": "font/woff2",
}  # fmt: skip
router = APIRouter(include_in_schema=False)


class File(NamedTuple):
    body: bytes
    kind: str
    etag: str


def read_page() -> dict[str, File]:
    """Every file of the page by its path below web/; no other file is served."""
    found: dict[str, File] = {}
    root = Path(__file__).parent / "web"
    for path in root.rglob("*"):
        if path.suffix in KINDS:
            body, name = path.read_bytes(), path.relative_to(root).as_posix()
            found[name] = File(body, KINDS[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return found


def answer(request: Request, name: str) -> Response:
    file: File | None = request.app.state.page.get(name)
    if file is None:
        raise Problem(404, "not-found", "No such file", "the page has no such file")
    headers = {"ETag": file.etag, "Cache-Control": "no-cache", "Content-Security-Policy": POLICY}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


@router.api_route("/", methods=["GET", "HEAD"])
async def index(request: Request) -> Response:
    return answer(request, "index.html")


@router.api_route("/favicon.ico", methods=["GET", "HEAD"])
async def icon(request: Request) -> Response:
    return answer(request, "icons/mark.svg")


@router.api_route("/web/{name:path}", methods=["GET", "HEAD"])
async def asset(request: Request, name: str) -> Response:
    return answer(request, name)
