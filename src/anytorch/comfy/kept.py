"""Engines that stay loaded between runs: loading one takes longer than using it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

MOST = 2  # of all kinds together; the one unused for longest goes first

_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = threading.Lock()


def kept(key: Hashable, make: Callable[[], Any]) -> Any:
    """The value `make` returned for the first call with `key`. Not thread-safe: ComfyUI runs one node at a time."""
    with _lock:
        if key not in _kept:
            while len(_kept) >= MOST:
                close(_kept.popitem(last=False)[1])
            _kept[key] = make()
        _kept.move_to_end(key)
        return _kept[key]


def forget() -> int:
    """Close all of them, and say how many there were."""
    with _lock:
        count = len(_kept)
        while _kept:
            close(_kept.popitem()[1])
        return count


def close(engine: Any) -> None:
    if hasattr(engine, "close"):
        engine.close()
