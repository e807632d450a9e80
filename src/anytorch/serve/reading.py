"""JSON bodies as values. Pure reading: what may be in one is the end points' affair."""

from __future__ import annotations

import gc
from typing import Any

import orjson

LARGE_NBYTES = 64 * 1024


def parse_json(body: bytes) -> Any:
    """The value in a body. Raises orjson.JSONDecodeError.

    A body of a few megabytes can hold millions of empty lists, and the garbage collector would walk those that are made
    again and again while more are: seconds, for which the event loop would stand still. Nothing of a parsed document is
    garbage, so it is not looked for meanwhile.
    """
    if len(body) < LARGE_NBYTES or not gc.isenabled():
        return orjson.loads(body)
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()
