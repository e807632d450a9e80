"""The waiting requests of an engine: those admitted, and behind them those for which there is no room yet; and batches.

Callers' threads put requests in and take them out again, the worker's thread takes batches. `changed` guards all of it;
every method but `expire` and `stats` is called with it held.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anytorch.counts import counted
from anytorch.errors import QueueClosed, QueueFull
from anytorch.text.embed.tokens import Tokens

if TYPE_CHECKING:
    from anytorch.text.embed.engine import ArrowEngine

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


class EmbedRequest:
    """One request to the queue: what it asks for and how far it is. Raises UsageError for invalid options."""

    def __init__(
        self,
        engine: ArrowEngine,
        tokens: Tokens,
        *,
        single: bool = False,
        dim: int | None = None,
        precision: str = "float32",
        output: str = "numpy",
        timeout_s: float | None = None,
    ) -> None:
        columns, dtype = engine.check_request(dim, precision, output)
        self.tokens, self.single, self.dim, self.precision, self.output = tokens, single, dim, precision, output
        self.lengths: list[int] = tokens.lengths.tolist()
        self.rows: npt.NDArray[Any] = np.empty((len(self.lengths), columns), dtype)
        self.arrived = time.monotonic()
        self.deadline = None if timeout_s is None else self.arrived + timeout_s
        self.future: Future[Any] = Future()
        self.taken = 0  # texts handed to the encoder
        self.left = len(self.lengths)  # texts without an answer
        self.waiting_tokens = int(tokens.starts[-1])  # of the texts not handed over yet
        self.entered = False  # there was room for it
        self.finished = False  # somebody answers it, or nobody has to: see `claim`

    def claim(self) -> bool:
        """Claim the right to resolve it (lock held): True for the first caller. Until then the future can still be
        cancelled.

        The answer itself is set after the lock: it calls what others have hung on the future, and that may need a lock
        whose holder is about to call `submit`.
        """
        if self.finished:
            return False
        self.finished = True
        return self.future.set_running_or_notify_cancel()

    def timed_out(self) -> TimeoutError:
        assert self.deadline is not None
        seconds = self.deadline - self.arrived
        if self.entered:
            return TimeoutError(f"not computed within {seconds:.3g} s")
        return TimeoutError(f"the queue stayed full until the request's time was up ({seconds:.3g} s)")


class WaitingLine:
    """Bounded by `max_tokens`, and by what takes `max_s` to compute at the measured rate."""

    def __init__(self, max_tokens: int, max_s: float | None, *, refuse: bool) -> None:
        """`refuse`: there is no waiting outside; QueueFull instead."""
        self._max_tokens, self._max_s, self._refuse = max_tokens, max_s, refuse
        self.changed = threading.Condition()
        self.requests: list[EmbedRequest] = []  # with texts that no batch has taken yet, oldest first
        self.outside: deque[EmbedRequest] = deque()  # those for which there is no room yet, oldest first
        self.tokens = 0  # of `requests`
        self.closing = False
        self.late: list[EmbedRequest] = []  # whose time is up, until the worker has told them
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

    def admit(self, request: EmbedRequest) -> None:
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

    def wait_for_room(self, request: EmbedRequest) -> None:
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

    def _enter(self, request: EmbedRequest) -> None:
        request.entered = True
        self.requests.append(request)
        self.tokens += request.waiting_tokens
        self.count(requests=1, texts=len(request.lengths))

    def _let_in(self) -> None:
        while self.outside and self._has_room(self.outside[0]):
            self._enter(self.outside.popleft())
            self.changed.notify_all()

    # --- room ------------------------------------------------------------------------------------------------------

    def _has_room(self, request: EmbedRequest) -> bool:
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

    def give_up(self) -> list[EmbedRequest]:
        """Take out all that wait; they are the caller's to cancel."""
        given_up = [*self.requests, *self.outside]
        self.requests, self.tokens = [], 0
        self.outside.clear()
        return given_up

    def expire(self, request: EmbedRequest) -> None:
        """Time out a request: its caller gets the TimeoutError now, and others its room."""
        with self.changed:
            mine = request.claim()
            if mine:
                self.count(timed_out=1)
                self._remove(request)
        if mine:
            request.future.set_exception(request.timed_out())

    def _withdraw(self, request: EmbedRequest | None) -> None:
        """Called with every request that is done: one that was cancelled must not take room."""
        if request is not None and request.future.cancelled():
            with self.changed:
                self.count(cancelled=1)
                self._remove(request)

    def _remove(self, request: EmbedRequest) -> None:
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


# --- batches -----------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """Texts [begin, end) of the request at this place in the list."""

    request: int
    begin: int
    end: int


def share_batch(waiting: Sequence[tuple[int, Sequence[int]]], budget: int) -> list[Share]:
    """Fill one batch of `budget` tokens from requests, oldest first, each given as (next text, lengths of all texts).

    First everyone gets an equal part of the budget, so that a short request is served at once beside a long one. What is
    left goes round, a text to each, oldest first, beginning with those who have got nothing: a request of one long text
    has its turn by its age, and one of a thousand texts does not take the turns of all others. (By the least left to do
    instead, long texts wait for as long as shorter ones keep coming: simulated with 128 clients, the slowest hundredth
    waited 5.8 s, and so 1.4 s.) The oldest always gets at least one text, so that no request waits for ever.
    """
    if not waiting:
        return []
    ends = [begin for begin, _ in waiting]
    left = budget
    equal = budget // len(waiting)
    for place, (begin, lengths) in enumerate(waiting):
        part = min(equal, left)
        while ends[place] < len(lengths) and lengths[ends[place]] <= part:
            part -= lengths[ends[place]]
            left -= lengths[ends[place]]
            ends[place] += 1
        if place == 0 and ends[0] == begin and begin < len(lengths):
            left -= lengths[begin]
            ends[0] += 1
    round_number = 0
    given = True
    while (given or round_number == 1) and left > 0:
        given = False
        for place, (begin, lengths) in enumerate(waiting):
            if round_number == 0 and ends[place] > begin:
                continue  # the first round is for those who have got nothing yet
            if ends[place] < len(lengths) and lengths[ends[place]] <= left:
                left -= lengths[ends[place]]
                ends[place] += 1
                given = True
        round_number += 1
    return [Share(place, begin, ends[place]) for place, (begin, _) in enumerate(waiting) if ends[place] > begin]


Batch = list[tuple[EmbedRequest, Share]]


def tokens_of(batch: Batch) -> int:
    return sum(sum(request.lengths[share.begin : share.end]) for request, share in batch)


def joined(batch: Batch) -> Tokens:
    """The texts of a batch as one packed array. Texts that were cut are counted with a request's first."""
    return Tokens.joined(
        [
            request.tokens.part(share.begin, share.end, 0 if share.begin else request.tokens.truncated)
            for request, share in batch
        ]
    )
