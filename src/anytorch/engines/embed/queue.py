"""EngineQueue: many callers, one engine. Requests that wait at the same time are computed together.

A worker thread takes texts from all waiting requests up to a token budget (`sharing`), so that a short request is not
held up behind a long one. Texts are tokenized in the caller's thread: bad input is the caller's error at once and nobody
else's. If a batch fails, its requests are computed one by one and only the culprit gets the error.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from anytorch import logs
from anytorch.engines.embed.sharing import Share, share_batch
from anytorch.engines.embed.tokens import Tokens, check_iterable
from anytorch.errors import QueueClosed, QueueFull, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

log = logs.logger(__name__)

IDLE_S = 2.0  # after which the worker ends; the next request starts another. A thread would keep its engine for ever
RATE_WEIGHT = 0.2  # of the newest batch in the rate that admission goes by
LONGEST_WAIT_S = 3600.0  # of a thread that waits for something to happen, before it looks again


class Engine(Protocol):
    """What the queue needs of an ArrowEngine."""

    @property
    def batch_tokens(self) -> int: ...

    def tokenize(self, texts: list[str], *, prompt: str | None = None) -> Tokens: ...

    @property
    def batches_ahead(self) -> int: ...

    def start_tokens(self, tokens: Tokens) -> Callable[[], npt.NDArray[np.float32]]: ...

    def finish(self, pooled: npt.NDArray[np.float32], dim: int | None, precision: str) -> npt.NDArray[Any]: ...

    def check_request(self, dim: int | None, precision: str, output: str) -> tuple[int, str]: ...

    def as_output(self, vectors: npt.NDArray[Any], output: str) -> Any: ...


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


@dataclass(frozen=True)
class BatchReport:
    """One computed batch, for those who keep count: `EngineQueue(observe=…)`."""

    texts: int
    tokens: int
    requests: int
    waited_s: tuple[float, ...]  # of each request in it, from its arrival to the start
    seconds: float  # from the start to the answer
    failed: bool = False


@dataclass(eq=False)
class _Request:
    tokens: Tokens
    lengths: list[int]
    rows: npt.NDArray[Any]
    single: bool
    dim: int | None
    precision: str
    output: str
    arrived: float
    deadline: float | None
    future: Future[Any] = field(default_factory=Future)
    taken: int = 0  # texts handed to the encoder
    left: int = 0  # texts without an answer
    waiting_tokens: int = 0  # of the texts not handed over yet
    entered: bool = False  # there was room for it
    finished: bool = False  # somebody answers it, or nobody has to: see `_claim`

    def timed_out(self) -> TimeoutError:
        assert self.deadline is not None
        seconds = self.deadline - self.arrived
        if self.entered:
            return TimeoutError(f"not computed within {seconds:.3g} s")
        return TimeoutError(f"the queue stayed full until the request's time was up ({seconds:.3g} s)")


_Batch = list[tuple[_Request, Share]]


class EngineQueue:
    """Dynamic batching in front of an engine, for threads and for asyncio.

    `batch_tokens`: of one batch; None: the engine's own. `max_wait_s`: how long a request may wait for company; only
    waited for while there is any (a lone caller is served at once). `max_waiting_tokens`: more than that may not wait;
    nor more than takes `max_waiting_s` to compute, as full batches have measured it. `when_full`: "wait" until there is
    room, in the order of arrival, or "raise" QueueFull. `observe` is called in the worker's thread after every batch; if
    it fails that is logged, once.
    `close()` finishes what waits; also a context manager.

    >>> with EngineQueue(engine) as queue:
    ...     queue.encode(["one", "two"])            # from any thread
    ...     await queue.aencode("three")            # from any task
    """

    def __init__(
        self,
        engine: Engine,
        *,
        batch_tokens: int | None = None,
        max_wait_s: float = 0.003,
        max_waiting_tokens: int = 1_000_000,
        max_waiting_s: float | None = None,
        when_full: Literal["wait", "raise"] = "wait",
        observe: Callable[[BatchReport], None] | None = None,
    ) -> None:
        if when_full not in ("wait", "raise"):
            raise UsageError(f"when_full={when_full!r}: use 'wait' or 'raise'")
        if max_wait_s < 0 or max_waiting_tokens < 1 or (batch_tokens is not None and batch_tokens < 1):
            raise UsageError("max_wait_s must be at least 0, batch_tokens and max_waiting_tokens at least 1")
        if max_waiting_s is not None and not max_waiting_s > 0:
            raise UsageError(f"max_waiting_s={max_waiting_s!r}: use a number of seconds above 0")
        self._engine = engine
        self._batch_tokens = batch_tokens
        self._max_wait_s = max_wait_s
        self._max_waiting, self._max_waiting_s = max_waiting_tokens, max_waiting_s
        self._when_full = when_full
        self._observe = observe
        self._changed = threading.Condition()  # guards all below
        self._requests: list[_Request] = []  # with texts that no batch has taken yet, oldest first
        self._line: deque[_Request] = deque()  # those for which there is no room yet, oldest first
        self._waiting = 0  # tokens of `_requests`
        self._closing = False
        self._company = 0  # requests in the last batch
        self._stats = QueueStats()
        self._late: list[_Request] = []  # whose time is up, until the worker has told them
        self._worker: threading.Thread | None = None
        self._tokens_per_s: float | None = None  # of full batches, lately; None until there was one
        self._ended = 0.0  # when the last batch was done
        self._began: float | None = None  # when the worker started the batch it waits for
        self._observe_failed = False  # and that was said

    # --- asking ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        dim: int | None = None,
        precision: str = "float32",
        output: str = "numpy",
        timeout_s: float | None = None,
    ) -> Future[Any]:
        """Give a request to the queue; the future has what `ArrowEngine.encode` would return.

        Cancelling the future takes what has not been computed yet out of the queue. After `timeout_s` it gets a
        TimeoutError (at the latest when the batch under way is done; `encode` and `aencode` raise it on time). Raises
        InputError for texts that cannot be used, QueueFull if it is full and may not wait.
        """
        request = self._request(texts, prompt, dim, precision, output, timeout_s)
        self._admit(request, block=True)
        return request.future

    def submit_tokens(
        self,
        tokens: Tokens,
        *,
        dim: int | None = None,
        precision: str = "float32",
        output: str = "numpy",
        timeout_s: float | None = None,
    ) -> Future[Any]:
        """As `submit`, for texts that are tokens already (`ArrowEngine.tokenize`, `token_ids.pack_ids`).

        Never blocks, so that an event loop may call it: where there is no room, the request waits outside.
        """
        request = self._made(tokens, False, dim, precision, output, timeout_s)
        self._admit(request, block=False)
        return request.future

    def encode(self, texts: str | Iterable[str], **options: Any) -> Any:
        """As `submit`, waiting for the answer; raises TimeoutError when `timeout_s` is over."""
        request = self._request(texts, **options)
        self._admit(request, block=True)
        left = None if request.deadline is None else max(0.0, request.deadline - time.monotonic())
        try:
            return request.future.result(left)
        except FutureTimeout:
            if not request.future.done():
                self._expire(request)
            return request.future.result()

    async def aencode(self, texts: str | Iterable[str], **options: Any) -> Any:
        """As `encode`, for asyncio. Cancelling the task takes the request out of the queue, also while it waits for room."""
        import asyncio

        request = await asyncio.to_thread(self._request, texts, **options)  # tokenizing takes its time
        self._admit(request, block=False)
        waiting = asyncio.wrap_future(request.future)
        if request.deadline is None:
            return await waiting
        timer = asyncio.get_running_loop().call_later(
            max(0.0, request.deadline - time.monotonic()), self._expire, request
        )
        try:
            return await waiting
        finally:
            timer.cancel()

    @property
    def stats(self) -> QueueStats:
        with self._changed:
            return replace(
                self._stats,
                waiting_requests=len(self._requests),
                waiting_tokens=self._waiting,
                without_room=len(self._line),
            )

    def stuck(self, after_s: float = 120.0) -> str:
        """Why nothing is answered: a batch has taken longer than `after_s`, or the worker is gone. "" if all is well."""
        with self._changed:
            began, worker = self._began, self._worker
            waiting = bool(self._requests)
        if began is not None and time.monotonic() - began > after_s:
            return f"a batch has not come back for {time.monotonic() - began:.0f} s"
        if waiting and (worker is None or not worker.is_alive()):
            return "requests are waiting and nobody computes them"
        return ""

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests; finish those that wait, or with `drain=False` cancel them. Calling it twice is no error."""
        with self._changed:
            self._closing = True
            given_up = [] if drain else [*self._requests, *self._line]
            if given_up:
                self._requests, self._waiting = [], 0
                self._line.clear()
            self._changed.notify_all()
            worker = self._worker
        for request in given_up:
            request.future.cancel()
        if given_up:
            with self._changed:  # those who wait for room look again
                self._changed.notify_all()
        if worker is not None and worker is not threading.current_thread():
            worker.join()

    def __enter__(self) -> EngineQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    # --- admission -------------------------------------------------------------------------------------------------

    def _request(
        self,
        texts: str | Iterable[str],
        prompt: str | None = None,
        dim: int | None = None,
        precision: str = "float32",
        output: str = "numpy",
        timeout_s: float | None = None,
    ) -> _Request:
        single = isinstance(texts, str)
        check_iterable(texts)
        self._engine.check_request(dim, precision, output)
        if isinstance(texts, str):
            texts = [texts]
        elif hasattr(texts, "to_pylist"):  # an Arrow array: its items are scalars, which are no str
            texts = texts.to_pylist()
        tokens = self._engine.tokenize(list(texts), prompt=prompt)
        return self._made(tokens, single, dim, precision, output, timeout_s)

    def _made(
        self, tokens: Tokens, single: bool, dim: int | None, precision: str, output: str, timeout_s: float | None
    ) -> _Request:
        import numpy as np

        columns, dtype = self._engine.check_request(dim, precision, output)
        count = len(tokens.starts) - 1
        now = time.monotonic()
        return _Request(
            tokens,
            tokens.lengths.tolist(),
            np.empty((count, columns), dtype),
            single,
            dim,
            precision,
            output,
            now,
            None if timeout_s is None else now + timeout_s,
            left=count,
            waiting_tokens=int(tokens.starts[-1]),
        )

    def _admit(self, request: _Request, *, block: bool) -> None:
        """Let a request in, or into the line outside; with `block`, return when it is in (or will never be)."""
        if not request.left:
            request.future.set_result(self._engine.as_output(request.rows, request.output))
            return
        with self._changed:
            if self._closing:
                raise QueueClosed("the queue is closed")
            if not self._line and self._has_room(request):
                self._enter(request)
            elif self._when_full == "raise":
                self._stats = replace(self._stats, rejected=self._stats.rejected + 1)
                raise QueueFull(self._full_words(), hint="try again later, or send fewer texts at a time")
            else:
                self._line.append(request)
            # A future keeps its callbacks: a circle would keep every answer until the next garbage collection.
            held = weakref.ref(request)
            request.future.add_done_callback(lambda _: self._withdraw(held()))
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="anytorch-queue", daemon=True)
                self._worker.start()
            self._changed.notify_all()
            if block:
                self._wait_for_room(request)

    def _wait_for_room(self, request: _Request) -> None:
        try:
            while not request.entered and not request.finished and not request.future.done():
                if request.deadline is not None and time.monotonic() >= request.deadline:
                    if self._claim(request):
                        self._stats = replace(self._stats, timed_out=self._stats.timed_out + 1)
                    raise request.timed_out()
                self._changed.wait(self._seconds_until(request.deadline))
        except BaseException:  # Ctrl-C, or its time is up: it must not be computed for nobody (who has no future of it)
            request.future.cancel()
            self._remove(request)
            raise

    def _has_room(self, request: _Request) -> bool:
        if not self._requests:
            return True  # one alone is always taken, however large
        if self._max_waiting_s is not None and self._waiting_s() > self._max_waiting_s:
            return False
        return self._waiting + request.waiting_tokens <= self._max_waiting

    def _waiting_s(self) -> float:
        """How long what waits will take, as far as is known."""
        return 0.0 if self._tokens_per_s is None else self._waiting / self._tokens_per_s

    def _full_words(self) -> str:
        waiting = f"{self._waiting} tokens of {len(self._requests)} requests are waiting"
        if self._max_waiting_s is not None and self._waiting_s() > self._max_waiting_s:
            return f"{waiting}, which takes {self._waiting_s():.1f} s; {self._max_waiting_s:g} s may wait"
        return f"{waiting}, {self._max_waiting} may"

    def _count_rate(self, taken: _Batch, began: float) -> None:
        """Full batches say how fast requests are worked off; a lone short text says nothing about that."""
        now = time.monotonic()
        seconds, self._ended = now - max(began, self._ended), now  # batches may overlap
        tokens = sum(sum(request.lengths[share.begin : share.end]) for request, share in taken)
        if 2 * tokens < (self._batch_tokens or self._engine.batch_tokens) or seconds <= 0:
            return
        rate = tokens / seconds
        with self._changed:
            known = self._tokens_per_s
            self._tokens_per_s = rate if known is None else known + RATE_WEIGHT * (rate - known)

    def _enter(self, request: _Request) -> None:
        request.entered = True
        self._requests.append(request)
        self._waiting += request.waiting_tokens
        self._stats = replace(
            self._stats, requests=self._stats.requests + 1, texts=self._stats.texts + len(request.lengths)
        )

    def _expire(self, request: _Request) -> None:
        """Its time is up: the caller gets the TimeoutError now, and others its room."""
        with self._changed:
            mine = self._claim(request)
            if mine:
                self._stats = replace(self._stats, timed_out=self._stats.timed_out + 1)
                self._remove(request)
        if mine:
            request.future.set_exception(request.timed_out())

    @staticmethod
    def _seconds_until(moment: float | None) -> float:
        return LONGEST_WAIT_S if moment is None else max(0.0, min(LONGEST_WAIT_S, moment - time.monotonic()))

    # --- the worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        under_way: deque[tuple[_Batch, Callable[[], Any], float]] = deque()
        while True:
            with self._changed:
                taken = self._next_batch(wait=not under_way)
                late, self._late = self._late, []
            if late:
                for request in late:
                    request.future.set_exception(request.timed_out())
                continue
            if taken:
                began = time.monotonic()
                under_way.append((taken, self._started(taken), began))
                if len(under_way) <= self._engine.batches_ahead:
                    continue  # the device has begun; the next batch can be made meanwhile
            elif not under_way:
                return
            taken, answer, began = under_way.popleft()
            self._began = began
            try:
                self._compute(taken, self._observed(taken, answer, began))
                self._count_rate(taken, began)
            except Exception as exc:  # noqa: BLE001  (our own mistake: nobody may be left waiting for it)
                log.error("the queue's worker failed: %s: %s", type(exc).__name__, exc)
                for request, _ in taken:
                    self._fail(request, exc)
            self._began = None

    def _started(self, taken: _Batch) -> Callable[[], Any]:
        try:
            return self._engine.start_tokens(joined(taken))
        except Exception as exc:  # noqa: BLE001  (raised again where the answer is asked for)
            failure = exc

            def answer() -> Any:
                raise failure

            return answer

    def _observed(self, taken: _Batch, answer: Callable[[], Any], began: float) -> Callable[[], Any]:
        """The same answer, told to `observe` once it is there."""
        observe = self._observe
        if observe is None:
            return answer

        def observed() -> Any:
            failed = True
            try:
                pooled = answer()
                failed = False
                return pooled
            finally:
                lengths = [sum(request.lengths[share.begin : share.end]) for request, share in taken]
                report = BatchReport(
                    texts=sum(share.end - share.begin for _, share in taken),
                    tokens=sum(lengths),
                    requests=len(taken),
                    waited_s=tuple(began - request.arrived for request, _ in taken),
                    seconds=time.monotonic() - began,
                    failed=failed,
                )
                try:
                    observe(report)
                except Exception as exc:  # noqa: BLE001  (who keeps count wrongly must not cost others their answer)
                    self._say_observe_failed(exc)

        return observed

    def _say_observe_failed(self, exc: Exception) -> None:
        if not self._observe_failed:  # once: it would be said for every batch
            self._observe_failed = True
            log.error("observe=%r of the queue failed: %s: %s", self._observe, type(exc).__name__, exc)

    def _next_batch(self, *, wait: bool) -> _Batch | None:
        """A batch that is full, or whose oldest request has waited long enough. None: none yet (`wait`: closed and done),
        or somebody in `_late` is to be told first."""
        while True:
            self._drop_finished()
            if self._late:
                return None
            if self._requests:
                budget = self._batch_tokens or self._engine.batch_tokens
                ready_at = self._requests[0].arrived + (self._max_wait_s if self._company > 1 else 0.0)
                if self._closing or self._waiting >= budget or time.monotonic() >= ready_at:
                    return self._take(budget)
                if wait:
                    self._changed.wait(self._seconds_until(ready_at))
                    continue
            elif wait and not self._closing:
                if self._changed.wait(IDLE_S) or self._requests:
                    continue
                self._worker = None
            return None

    def _drop_finished(self) -> None:
        """Take out requests that failed in an earlier batch or ran out of time; let others in."""
        now = time.monotonic()
        for group in (self._requests, self._line):
            for request in [
                r for r in group if r.finished or r.future.done() or (r.deadline is not None and now >= r.deadline)
            ]:
                if self._claim(request):
                    self._stats = replace(self._stats, timed_out=self._stats.timed_out + 1)
                    self._late.append(request)
                self._remove(request)
        self._let_in()

    def _remove(self, request: _Request) -> None:
        """Take a request out, wherever it waits. Its room is free at once, also while a batch is being computed."""
        if request in self._requests:
            self._requests.remove(request)
            self._waiting -= request.waiting_tokens
        elif request in self._line:
            self._line.remove(request)
        else:
            return
        self._let_in()
        self._changed.notify_all()

    def _withdraw(self, request: _Request | None) -> None:
        """Called with every request that is done: one that was cancelled must not take room."""
        if request is not None and request.future.cancelled():
            with self._changed:
                self._stats = replace(self._stats, cancelled=self._stats.cancelled + 1)
                self._remove(request)

    def _let_in(self) -> None:
        while self._line and self._has_room(self._line[0]):
            self._enter(self._line.popleft())
            self._changed.notify_all()

    def _take(self, budget: int) -> _Batch:
        taken = []
        tokens = 0
        for share in share_batch([(request.taken, request.lengths) for request in self._requests], budget):
            request = self._requests[share.request]
            request.taken = share.end
            mine = sum(request.lengths[share.begin : share.end])
            request.waiting_tokens -= mine
            tokens += mine
            taken.append((request, share))
        self._requests = [request for request in self._requests if request.taken < len(request.lengths)]
        self._waiting -= tokens
        self._stats = replace(
            self._stats, batches=self._stats.batches + 1, batch_tokens=self._stats.batch_tokens + tokens
        )
        self._company = len(taken)
        self._let_in()
        return taken

    def _compute(self, taken: _Batch, answer: Callable[[], Any]) -> None:
        try:
            pooled = answer()
        except Exception as exc:  # noqa: BLE001  (whatever it is, it is the requests' answer)
            if len(taken) == 1:
                self._fail(taken[0][0], exc)
                return
            log.info("a batch of %d requests failed (%s); each is computed by itself", len(taken), exc)
            for one in taken:
                self._compute([one], self._started([one]))
            return
        row = 0
        for request, share in taken:
            count = share.end - share.begin
            try:
                request.rows[share.begin : share.end] = self._engine.finish(
                    pooled[row : row + count], request.dim, request.precision
                )
            except Exception as exc:  # noqa: BLE001
                self._fail(request, exc)
            row += count
            request.left -= count
            if request.left == 0 and not request.finished:
                self._answer(request)

    def _answer(self, request: _Request) -> None:
        try:
            value = self._engine.as_output(request.rows, request.output)
        except Exception as exc:  # noqa: BLE001
            self._fail(request, exc)
            return
        with self._changed:
            mine = self._claim(request)
        if mine:
            request.future.set_result(value[0] if request.single else value)

    def _fail(self, request: _Request, exc: Exception) -> None:
        with self._changed:
            mine = self._claim(request)
            if mine:
                self._stats = replace(self._stats, failed=self._stats.failed + 1)
        if mine:
            request.future.set_exception(exc)

    @staticmethod
    def _claim(request: _Request) -> bool:
        """Is it the caller, who holds the lock, who answers this request? Only now is the future running, so that it
        could be cancelled until here.

        The answer itself is set after the lock: it calls what others have hung on the future, and that may need a lock
        whose holder is about to call `submit`.
        """
        if request.finished:
            return False
        request.finished = True
        return request.future.set_running_or_notify_cancel()


def joined(taken: _Batch) -> Tokens:
    """The texts of a batch as one packed array."""
    import numpy as np

    ids, lengths = [], []
    for request, share in taken:
        starts = request.tokens.starts
        ids.append(request.tokens.ids[starts[share.begin] : starts[share.end]])
        lengths.append(np.diff(starts[share.begin : share.end + 1]))
    starts = np.zeros(sum(map(len, lengths)) + 1, np.int32)
    np.cumsum(np.concatenate(lengths), out=starts[1:])
    truncated = sum(request.tokens.truncated for request, share in taken if share.begin == 0)
    return Tokens(np.concatenate(ids), starts, truncated)
