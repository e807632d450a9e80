"""The waiting requests of an engine: those admitted, and behind them those for which there is no room yet.

Callers' threads put requests in and take them out again, the worker's thread takes batches. `changed` guards all of it;
every method but `expire` and `stats` is called by who holds it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, replace

from anytorch.counts import counted
from anytorch.errors import QueueClosed, QueueFull
from anytorch.text.embed.queue_request import Batch, Request
from anytorch.text.embed.sharing import share_batch

RATE_WEIGHT = 0.2  # of the newest batch in the rate that admission goes by
LONGEST_WAIT_S = 3600.0  # of a thread that waits for something to happen, before it looks again


@dataclass(frozen=True)
class QueueStats:
    """Counts since the queue was made, and what waits now."""

    requests: int = 0
    texts: int = 0
    batches: int = 0
    batch_tokens: int = 0  # in all batches together: divided by `batches`, how full they were
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0  # refused because the queue was full
    timed_out: int = 0
    waiting_requests: int = 0
    waiting_tokens: int = 0
    without_room: int = 0  # requests that wait for room in the queue (when_full="wait")


class WaitingLine:
    """Bounded by `max_tokens`, and by what takes `max_s` to compute at the measured rate."""

    def __init__(self, max_tokens: int, max_s: float | None, *, refuse: bool) -> None:
        """`refuse`: there is no waiting outside; QueueFull instead."""
        self._max_tokens, self._max_s, self._refuse = max_tokens, max_s, refuse
        self.changed = threading.Condition()
        self.requests: list[Request] = []  # with texts that no batch has taken yet, oldest first
        self.outside: deque[Request] = deque()  # those for which there is no room yet, oldest first
        self.tokens = 0  # of `requests`
        self.closing = False
        self.late: list[Request] = []  # whose time is up, until the worker has told them
        self.tokens_per_s: float | None = None  # of full batches, lately; None until there was one
        self._stats = QueueStats()

    @property
    def stats(self) -> QueueStats:
        with self.changed:
            return replace(
                self._stats,
                waiting_requests=len(self.requests),
                waiting_tokens=self.tokens,
                without_room=len(self.outside),
            )

    def count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    # --- coming ----------------------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Let a request in, or have it wait outside. Raises QueueClosed, or QueueFull where it may not wait."""
        if self.closing:
            raise QueueClosed("the queue is closed")
        if not self.outside and self._has_room(request):
            self._enter(request)
        elif self._refuse:
            self.count(rejected=1)
            raise QueueFull(self._full_words(), hint="try again later, or send fewer texts at a time")
        else:
            self.outside.append(request)
        # A future keeps its callbacks: a circle would keep every answer until the next garbage collection.
        held = weakref.ref(request)
        request.future.add_done_callback(lambda _: self._withdraw(held()))

    def wait_for_room(self, request: Request) -> None:
        """Return when a request is in, or will never be. Raises TimeoutError when its time is up before."""
        try:
            while not request.entered and not request.finished and not request.future.done():
                if request.deadline is not None and time.monotonic() >= request.deadline:
                    if request.claim():
                        self.count(timed_out=1)
                    raise request.timed_out()
                self.changed.wait(seconds_until(request.deadline))
        except BaseException:  # Ctrl-C, or its time is up: it must not be computed for nobody (who has no future of it)
            request.future.cancel()
            self._remove(request)
            raise

    def _enter(self, request: Request) -> None:
        request.entered = True
        self.requests.append(request)
        self.tokens += request.waiting_tokens
        self.count(requests=1, texts=len(request.lengths))

    def _let_in(self) -> None:
        while self.outside and self._has_room(self.outside[0]):
            self._enter(self.outside.popleft())
            self.changed.notify_all()

    # --- room ------------------------------------------------------------------------------------------------------

    def _has_room(self, request: Request) -> bool:
        if not self.requests:
            return True  # one alone is always taken, however large
        if self._max_s is not None and self._seconds() > self._max_s:
            return False
        return self.tokens + request.waiting_tokens <= self._max_tokens

    def _seconds(self) -> float:
        """How long what waits will take, as far as is known."""
        return 0.0 if self.tokens_per_s is None else self.tokens / self.tokens_per_s

    def _full_words(self) -> str:
        waiting = f"{counted(self.tokens, 'token')} of {counted(len(self.requests), 'request')} are waiting"
        if self._max_s is not None and self._seconds() > self._max_s:
            return f"{waiting}, which takes {self._seconds():.1f} s; the limit is {self._max_s:g} s"
        return f"{waiting}; the limit is {self._max_tokens:,} tokens"

    def count_rate(self, tokens_per_s: float) -> None:
        """How fast a full batch was worked off."""
        known = self.tokens_per_s
        self.tokens_per_s = tokens_per_s if known is None else known + RATE_WEIGHT * (tokens_per_s - known)

    # --- going -----------------------------------------------------------------------------------------------------

    def take(self, budget: int) -> Batch:
        """A batch of at most `budget` tokens, with something of as many requests as possible."""
        batch = []
        tokens = 0
        for share in share_batch([(request.taken, request.lengths) for request in self.requests], budget):
            request = self.requests[share.request]
            request.taken = share.end
            mine = sum(request.lengths[share.begin : share.end])
            request.waiting_tokens -= mine
            tokens += mine
            batch.append((request, share))
        self.requests = [request for request in self.requests if request.taken < len(request.lengths)]
        self.tokens -= tokens
        self.count(batches=1, batch_tokens=tokens)
        self._let_in()
        return batch

    def drop_finished(self) -> None:
        """Take out requests that failed in an earlier batch or ran out of time (they are in `late` then); let others in."""
        now = time.monotonic()
        for group in (self.requests, self.outside):
            for request in [
                r for r in group if r.finished or r.future.done() or (r.deadline is not None and now >= r.deadline)
            ]:
                if request.claim():
                    self.count(timed_out=1)
                    self.late.append(request)
                self._remove(request)
        self._let_in()

    def give_up(self) -> list[Request]:
        """Take out all that wait; they are the caller's to cancel."""
        given_up = [*self.requests, *self.outside]
        self.requests, self.tokens = [], 0
        self.outside.clear()
        return given_up

    def expire(self, request: Request) -> None:
        """Time out a request: its caller gets the TimeoutError now, and others its room."""
        with self.changed:
            mine = request.claim()
            if mine:
                self.count(timed_out=1)
                self._remove(request)
        if mine:
            request.future.set_exception(request.timed_out())

    def _withdraw(self, request: Request | None) -> None:
        """Called with every request that is done: one that was cancelled must not take room."""
        if request is not None and request.future.cancelled():
            with self.changed:
                self.count(cancelled=1)
                self._remove(request)

    def _remove(self, request: Request) -> None:
        """Take a request out, wherever it waits. Its room is free at once, also while a batch is being computed."""
        if request in self.requests:
            self.requests.remove(request)
            self.tokens -= request.waiting_tokens
        elif request in self.outside:
            self.outside.remove(request)
        else:
            return
        self._let_in()
        self.changed.notify_all()


def seconds_until(moment: float | None) -> float:
    return LONGEST_WAIT_S if moment is None else max(0.0, min(LONGEST_WAIT_S, moment - time.monotonic()))
