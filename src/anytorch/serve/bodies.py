"""JSON bodies: refused before they are made into too many objects, parsed, and routes that do so."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from anytorch.serve.problems import Problem, reading

# A body of a few megabytes can hold millions of empty lists. Making them, and the garbage collector that walks them again
# and again while more are made, would hold up every other client for seconds. So they are counted before anything is made
# of them, and nothing of a parsed document is looked at for garbage meanwhile.

LARGE_NBYTES = 64 * 1024
MOST_NESTED = 65_536  # lists and objects in one body
QUOTE = ord('"')
UNIMPORTANT = bytes(set(range(256)) - set(b'[{"'))  # for the count of what a body opens


def parse_json(body: bytes) -> Any:
    """The value in a body. Raises orjson.JSONDecodeError."""
    if len(body) < LARGE_NBYTES or not gc.isenabled():
        return orjson.loads(body)
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()


def refuse_crowds(body: bytes, most: int = MOST_NESTED) -> None:
    """Raise a 413 Problem for a JSON body with more lists and objects than `most`. A millisecond or two for most bodies."""
    if len(body) < LARGE_NBYTES or body.count(b"[") + body.count(b"{") <= most:
        return
    count = opened(body)  # more exactly: texts may be full of brackets
    if count > most:
        raise Problem(
            413, "too-much", "The request is too large", f"the body has {count} lists and objects; the limit is {most}",
            hint="send it in several requests",
        )  # fmt: skip


def opened(body: bytes) -> int:
    """The number of lists and objects a JSON text opens, not counting brackets in strings.

    >>> opened(rb'{"a": ["[", "\\\\\\"[{", []]}')
    3
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    marks = np.frombuffer(plain.translate(None, delete=UNIMPORTANT), np.uint8)
    quotes = marks == QUOTE
    within = np.logical_xor.accumulate(quotes)
    return int(np.count_nonzero(~within & ~quotes))


class JsonRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        with reading("the body"):
            return parse_json(body)


class JsonRoute(APIRoute):
    """FastAPI's route, with `parse_json` for its bodies; what that raises is a kind of the json module's own error."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle
