"""Waiting for something that must happen: as long as a busy machine needs, and not for ever.

The limit ends a hang and says nothing about speed: no test may be right on a quiet machine alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def until(happens: Callable[[], object], what: str = "it to happen", seconds: float = PATIENCE_S) -> None:
    """Return as soon as `happens()` is true; fail when it has not been for `seconds`."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.005)
