"""A token bucket per client. Bounded: idle clients are dropped."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MOST = 10_000  # clients remembered


class Rates:
    """`rate` requests a second for each client, with bursts of up to `burst`."""

    def __init__(self, rate: float, burst: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, rate if burst is None else burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was

    def wait_s(self, client: str) -> float:
        """0 if the client may send a request now (which is then counted), else the seconds until it may."""
        now = self._clock()
        left, since = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        while len(self._buckets) > MOST:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate
