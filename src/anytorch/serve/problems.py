"""Answers as clients see them: errors as application/problem+json, without a stack trace; JSON and streams of events."""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from traceback import format_exception
from typing import Any
from uuid import uuid4

import orjson
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from anytorch import logs
from anytorch.errors import (
    AnytorchError,
    DeviceError,
    InputError,
    NativeUnavailable,
    OutOfMemory,
    PackageMissing,
    QueueClosed,
    QueueFull,
    TorchMissing,
    UsageError,
)

log = logs.logger(__name__)

CONTENT_TYPE = b"application/problem+json"
# Where OpenAI's client looks for its own shape of an error.
OPENAI_PATHS = frozenset({"/v1/embeddings", "/v1/completions", "/v1/chat/completions", "/v1/models"})
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
RETRY_AFTER_S = 1
LONGEST_NAME = 60  # of a field, in an answer
LONGEST_DETAIL, LONGEST_NAME = 1000, 200  # characters of an answer's words, and of a name in it
PACKAGES = Path(__file__).parents[2]
REFUSALS = frozenset({401, 403, 413, 421, 429, 503, 504})


class Problem(Exception):
    """An error response. `code` is the last part of the problem's type."""

    def __init__(
        self,
        status: int,
        code: str,
        title: str,
        detail: str = "",
        *,
        hint: str = "",
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(detail or title)
        self.status, self.code, self.title = status, code, title
        self.detail, self.hint, self.param = detail or title, hint, param
        self.headers = dict(headers or {})

    @property
    def refuses(self) -> bool:
        """True if the request could succeed elsewhere, later, or with a key; such refusals are counted."""
        return self.status in REFUSALS

    def body(self, path: str) -> bytes:
        document: dict[str, Any] = {
            "type": f"urn:anytorch:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": shortened(self.detail, LONGEST_DETAIL),
            "hint": shortened(self.hint, LONGEST_DETAIL) or None,
            "instance": shortened(path, LONGEST_NAME),
        }
        if path in OPENAI_PATHS:
            kind = OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
            words = shortened(self.detail, LONGEST_DETAIL) + (f" (hint: {document['hint']})" if self.hint else "")
            param = None if self.param is None else shortened(self.param, LONGEST_NAME)
            document["error"] = {"message": words, "type": kind, "code": self.code, "param": param}
        return orjson.dumps(document)

    def raw_headers(self, nbytes: int) -> list[tuple[bytes, bytes]]:
        fixed = [(b"content-type", CONTENT_TYPE), (b"content-length", str(nbytes).encode())]
        return fixed + [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]


def clean(text: str) -> str:
    """The text without lone surrogates, which JSON writers reject."""
    return text.encode("utf-8", "replace").decode()


def shortened(text: str, most: int) -> str:
    """The text as an answer may have it: clean, no longer than `most`, with the folders of this machine left out.

    What a client sent is not sent back by the kilobyte, and where things lie here is for the log.
    """
    if len(text) > most:
        text = text[: most - 1] + "…"
    for folder in private_folders():
        text = text.replace(folder, "…")
    return clean(text)


@lru_cache(maxsize=1)
def private_folders() -> tuple[str, ...]:
    """Folders whose names say who runs this and how it is set up, the longest first."""
    found = {Path(sys.prefix), Path(sys.base_prefix), PACKAGES}
    folders: tuple[Callable[[], str | Path], ...] = (Path.home, Path.cwd, tempfile.gettempdir)
    for ask in folders:
        try:
            found.add(Path(ask()))
        except (OSError, RuntimeError):
            pass  # no home, a working folder that was removed, no folder to write to: then there is no name to hide
    return tuple(sorted({str(one) for one in found if len(one.parts) > 1}, key=len, reverse=True))


def problem_of(exc: BaseException) -> Problem | None:
    """The problem for a domain error; None for an error that is a bug of ours."""
    if isinstance(exc, Problem):
        return exc
    if isinstance(exc, TimeoutError):
        return Problem(
            504, "deadline", "The deadline passed", str(exc) or "the answer was not ready in time",
            hint="send less per request, or a larger X-Request-Timeout",
        )  # fmt: skip
    if not isinstance(exc, AnytorchError):
        return None
    words: dict[str, Any] = {"detail": exc.message, "hint": exc.hint}
    if isinstance(exc, QueueFull):
        return Problem(429, "queue-full", "The queue is full", **words, headers=retry_after())
    if isinstance(exc, QueueClosed):
        return Problem(503, "stopping", "The service is stopping", **words, headers=retry_after())
    if isinstance(exc, InputError):
        return Problem(422, "unusable-input", "The input is invalid", **words)
    if isinstance(exc, UsageError):
        return Problem(422, "bad-request", "The request is invalid", **words)
    if isinstance(exc, OutOfMemory):
        return Problem(503, "out-of-memory", "The device is out of memory", **words, headers=retry_after())
    if isinstance(exc, (TorchMissing, PackageMissing, NativeUnavailable)):
        return Problem(503, "not-installed", "A required package is not installed", **words)
    if isinstance(exc, DeviceError):
        return Problem(503, "device-failed", "The device could not compute it", **words)
    return None


# What Python, pandas and others raise for values that nobody thought of.
UNREADABLE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error)
TOLD = (AnytorchError, ValidationError, orjson.JSONDecodeError)  # these are told in their own words


class reading:
    """A block that makes something of a client's data: what it raises of UNREADABLE becomes a 400 Problem, and is logged."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, _: object) -> None:
        if not isinstance(exc, UNREADABLE) or isinstance(exc, TOLD):
            return
        log.warning("%s cannot be read: %s", self._what, "".join(format_exception(exc)))
        raise Problem(
            400, "unreadable", "The request cannot be read", f"{self._what} cannot be read ({type(exc).__name__})",
            hint="check its values; the service's log says more",
        ) from exc  # fmt: skip


def retry_after(seconds: float = RETRY_AFTER_S) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds + 0.5)))}


def unexpected(exc: BaseException, where: str) -> Problem:
    """A failure of our own: its traceback goes to the log, its number to the client."""
    reference = uuid4().hex[:12]
    log.error("%s failed (%s): %s", where, reference, "".join(format_exception(exc)))
    return internal(reference)


def internal(reference: str) -> Problem:
    return Problem(
        500, "internal", "The service failed", f"this is a bug; the service's log has it under {reference}",
        hint="report it with the log's lines",
    )  # fmt: skip


def _shown(part: Any) -> str:
    """A part of a field's place. The client chose an unknown field's name, which may have any length."""
    name = str(part)
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


def validation_problem(errors: Iterable[Mapping[str, Any]]) -> Problem:
    """The problem for pydantic's errors: each field and its error, without repeating the input."""
    said = []
    param, hint = None, ""
    for error in list(errors)[:5]:
        place = ".".join(_shown(part) for part in error.get("loc", ()) if part not in ("body",))
        param = param or place or None
        message = str(error.get("msg", "invalid")).removeprefix("Value error, ")
        if error.get("type") == "extra_forbidden":
            message = "is not a field of this end point"
        if error.get("type") == "model_attributes_type" and not place:  # also what `curl -d` sends as a form
            message, hint = "is not a JSON object", "send a JSON object, with the header Content-Type: application/json"
        said.append(f"{place or 'the body'}: {message}")
    if any(error.get("type") == "json_invalid" for error in errors):
        return Problem(400, "not-json", "The body is not JSON", "; ".join(said))
    return Problem(422, "invalid-body", "The body is invalid", "; ".join(said) or "invalid", hint=hint, param=param)


# --- responses that end points write with orjson: large ones, and streams of events -----------------------------------

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
