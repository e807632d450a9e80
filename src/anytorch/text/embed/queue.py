"""EngineQueue: many callers share one engine; waiting requests are computed together.

A thread takes texts from all waiting requests (`queue_line`) up to a token budget, so that a short request is not held up
behind a long one, has the engine compute them, and answers. If a batch fails, its requests are computed one by one and
only the culprit gets the error. Texts are tokenized in the caller's thread: bad input is at once an error of that caller
alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from anytorch import limits, logs
from anytorch.errors import UsageError
from anytorch.text.embed.head import as_output
from anytorch.text.embed.queue_line import (
    Batch,
    EmbedRequest,
    QueueStats,
    WaitingLine,
    joined,
    seconds_until,
    tokens_of,
)
from anytorch.text.embed.tokens import Tokens, check_iterable
from anytorch.workers import start

if TYPE_CHECKING:
    from anytorch.text.embed.engine import ArrowEngine

log = logs.logger(__name__)

IDLE_S = 2.0  # after which the thread ends; the next request starts another. It would keep its engine for ever


@dataclass(frozen=True)
class BatchReport:
    """One computed batch, for those who keep count: `EngineQueue(observe=…)`."""

    texts: int
    tokens: int
    requests: int
    waited_s: tuple[float, ...]  # of each request in it, from its arrival to the start
    seconds: float  # from the start to the answer
    failed: bool = False


Observe = Callable[[BatchReport], None]


class EngineQueue(AbstractContextManager["EngineQueue"]):
    """Dynamic batching in front of an engine, for threads and for asyncio.

    `batch_tokens`: of one batch; None: the engine's own. `max_wait_s`: how long a request may wait for others; only
    while there are any (a lone caller is served at once). `max_waiting_tokens`: more than that may not wait;
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
        engine: ArrowEngine,
        *,
        batch_tokens: int | None = None,
        max_wait_s: float = 0.003,
        max_waiting_tokens: int = 1_000_000,
        max_waiting_s: float | None = None,
        when_full: Literal["wait", "raise"] = "wait",
        observe: Observe | None = None,
    ) -> None:
        if when_full not in ("wait", "raise"):
            raise UsageError(f"when_full={when_full!r}: use 'wait' or 'raise'")
        limits.SECONDS_OR_NONE.check("max_wait_s", max_wait_s)
        limits.COUNT.check("max_waiting_tokens", max_waiting_tokens)
        if batch_tokens is not None:
            limits.BATCH_TOKENS.check("batch_tokens", batch_tokens)
        if max_waiting_s is not None:
            limits.SECONDS.check("max_waiting_s", max_waiting_s)
        self._engine = engine
        self._line = WaitingLine(max_waiting_tokens, max_waiting_s, refuse=when_full == "raise")
        self._batch_tokens, self._max_wait_s, self._observe = batch_tokens, max_wait_s, observe
        self._observe_failed = False  # and that was said
        self._company = 0  # requests in the last batch
        self._ended = 0.0  # when the last batch was done
        self._began: float | None = None  # when the batch was started that is waited for
        self._thread: threading.Thread | None = None

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
        """Queue a request; the future holds what `ArrowEngine.encode` would return.

        Cancelling the future takes what has not been computed yet out of the queue. After `timeout_s` it gets a
        TimeoutError (at the latest when the batch under way is done; `encode` and `aencode` raise it on time). Raises
        InputError for texts that cannot be used, QueueFull if it is full and may not wait.
        """
        request = self._request(texts, prompt, timeout_s, dim=dim, precision=precision, output=output)
        self._admit(request, block=True)
        return request.future

    def submit_tokens(self, tokens: Tokens, **options: Any) -> Future[Any]:
        """As `submit`, for texts that are tokens already (`ArrowEngine.tokenize`, `tokens.pack_ids`). Takes its options
        except `prompt`.

        Never blocks, so that an event loop may call it: where there is no room, the request waits outside.
        """
        request = EmbedRequest(self._engine, tokens, **options)
        self._admit(request, block=False)
        return request.future

    def encode(self, texts: str | Iterable[str], **options: Any) -> Any:
        """As `submit`, waiting for the answer; raises TimeoutError when `timeout_s` is over. Ctrl-C withdraws it."""
        request = self._request(texts, **options)
        self._admit(request, block=True)
        left = None if request.deadline is None else max(0.0, request.deadline - time.monotonic())
        try:
            return request.future.result(left)
        except FutureTimeout:
            if not request.future.done():
                self._line.expire(request)
            return request.future.result()
        except BaseException:  # of the caller: nobody waits for it any more (one that is done cannot be cancelled)
            request.future.cancel()
            raise

    async def aencode(self, texts: str | Iterable[str], **options: Any) -> Any:
        """As `encode`, for asyncio. Cancelling the task takes the request out of the queue, also while it waits for room."""
        import asyncio

        request = await asyncio.to_thread(self._request, texts, **options)  # tokenizing takes its time
        self._admit(request, block=False)
        waiting = asyncio.wrap_future(request.future)
        if request.deadline is None:
            return await waiting
        timer = asyncio.get_running_loop().call_later(
            max(0.0, request.deadline - time.monotonic()), self._line.expire, request
        )
        try:
            return await waiting
        finally:
            timer.cancel()

    @property
    def stats(self) -> QueueStats:
        return self._line.stats

    @property
    def closing(self) -> bool:
        """True once `close` was called; no more requests are accepted."""
        return self._line.closing

    def stuck(self, after_s: float = 120.0) -> str:
        """Why no answers come: a batch takes longer than `after_s`, or the worker is gone. "" if all is well."""
        with self._line.changed:
            began, thread = self._began, self._thread
            waiting = bool(self._line.requests)
        if began is not None and time.monotonic() - began > after_s:
            return f"a batch has not come back for {time.monotonic() - began:.0f} s"
        if waiting and (thread is None or not thread.is_alive()):
            return "requests are waiting and no worker computes them"
        return ""

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests; finish the waiting ones, or cancel them with `drain=False`. May be called twice."""
        changed = self._line.changed
        with changed:
            self._line.closing = True
            given_up = [] if drain else self._line.give_up()
            changed.notify_all()
        for request in given_up:
            request.future.cancel()
        if given_up:
            with changed:  # those who wait for room look again
                changed.notify_all()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _request(
        self, texts: str | Iterable[str], prompt: str | None = None, timeout_s: float | None = None, **wanted: Any
    ) -> EmbedRequest:
        check_iterable(texts)
        asked = (wanted.get("dim"), wanted.get("precision", "float32"), wanted.get("output", "numpy"))
        self._engine.check_request(*asked)  # before a long iterable is read
        single = isinstance(texts, str)
        # The items of an Arrow array are scalars, which are no str.
        listed = [texts] if isinstance(texts, str) else getattr(texts, "to_pylist", partial(list, texts))()
        tokens = self._engine.tokenize(listed, prompt=prompt)
        return EmbedRequest(self._engine, tokens, single=single, timeout_s=timeout_s, **wanted)

    def _admit(self, request: EmbedRequest, *, block: bool) -> None:
        """Let a request in, or have it wait outside; with `block`, return when it is in (or will never be)."""
        if not request.left:
            request.future.set_result(as_output(request.rows, request.output))
            return
        with self._line.changed:
            # First, and kept once it runs: nobody waits for a thread that was refused, or for one of the parent of a fork.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._work, name="anytorch-queue", daemon=True)
                start(thread)
                self._thread = thread
            self._line.admit(request)
            self._line.changed.notify_all()
            if block:
                self._line.wait_for_room(request)

    # --- batches ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        line = self._line
        under_way: deque[tuple[Batch, Callable[[], Any], float]] = deque()
        while True:
            with line.changed:
                batch = self._next_batch(wait=not under_way)
                late, line.late = line.late, []
            if late:
                for request in late:
                    request.future.set_exception(request.timed_out())
                continue
            if batch:
                began = time.monotonic()
                under_way.append((batch, self._started(batch), began))
                if len(under_way) <= self._engine.batches_ahead:
                    continue  # the device has begun; the next batch can be made meanwhile
            elif not under_way:
                return
            batch, answer, began = under_way.popleft()
            self._began = began
            try:
                self._compute(batch, answer, began)
                self._count_rate(batch, began)
            except Exception as exc:  # noqa: BLE001  (our own mistake: nobody may be left waiting for it)
                log.error("the queue's worker failed: %s: %s", type(exc).__name__, exc)
                for request, _ in batch:
                    self._fail(request, exc)
            self._began = None

    def _next_batch(self, *, wait: bool) -> Batch | None:
        """A batch that is full, or whose oldest request has waited long enough. None: none yet (`wait`: closed and done),
        or somebody in `late` is to be told first."""
        line = self._line
        while True:
            line.drop_finished()
            if line.late:
                return None
            if line.requests:
                budget = self._batch_tokens or self._engine.batch_tokens
                ready_at = line.requests[0].arrived + (self._max_wait_s if self._company > 1 else 0.0)
                if line.closing or line.tokens >= budget or time.monotonic() >= ready_at:
                    batch = line.take(budget)
                    self._company = len(batch)
                    return batch
                if wait:
                    line.changed.wait(seconds_until(ready_at))
                    continue
            elif wait and not line.closing:
                if line.changed.wait(IDLE_S) or line.requests:
                    continue
                self._thread = None
            return None

    def _started(self, batch: Batch) -> Callable[[], Any]:
        try:
            return self._engine.start_tokens(joined(batch))
        except Exception as exc:  # noqa: BLE001  (raised again where the answer is asked for)
            failed: Future[Any] = Future()
            failed.set_exception(exc)
            return failed.result

    def _compute(self, batch: Batch, answer: Callable[[], Any], began: float | None = None) -> None:
        """Answer the requests of a batch. `began`: when it did; None for a part of one that failed, which is not told."""
        try:
            pooled = answer()
        except Exception as exc:  # noqa: BLE001  (whatever it is, it is the requests' answer)
            self._tell(batch, began, failed=True)
            if len(batch) == 1:
                self._fail(batch[0][0], exc)
                return
            log.info("a batch of %d requests failed (%s); each is computed by itself", len(batch), exc)
            for one in batch:
                self._compute([one], self._started([one]))
            return
        self._tell(batch, began, failed=False)
        row = 0
        for request, share in batch:
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

    def _count_rate(self, batch: Batch, began: float) -> None:
        """Full batches say how fast requests are worked off; a lone short text says nothing about that."""
        now = time.monotonic()
        seconds, self._ended = now - max(began, self._ended), now  # batches may overlap
        tokens = tokens_of(batch)
        if 2 * tokens < (self._batch_tokens or self._engine.batch_tokens) or seconds <= 0:
            return
        with self._line.changed:
            self._line.count_rate(tokens / seconds)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, request: EmbedRequest) -> None:
        try:
            value = as_output(request.rows, request.output)
        except Exception as exc:  # noqa: BLE001
            self._fail(request, exc)
            return
        with self._line.changed:
            mine = request.claim()
        if mine:
            request.future.set_result(value[0] if request.single else value)

    def _fail(self, request: EmbedRequest, exc: Exception) -> None:
        with self._line.changed:
            mine = request.claim()
            if mine:
                self._line.count(failed=1)
        if mine:
            request.future.set_exception(exc)

    def _tell(self, batch: Batch, began: float | None, *, failed: bool) -> None:
        if self._observe is None or began is None:
            return
        report = BatchReport(
            texts=sum(share.end - share.begin for _, share in batch),
            tokens=tokens_of(batch),
            requests=len(batch),
            waited_s=tuple(began - request.arrived for request, _ in batch),
            seconds=time.monotonic() - began,
            failed=failed,
        )
        try:
            self._observe(report)
        except Exception as exc:  # noqa: BLE001  (a faulty observer must not cost others their answer)
            if not self._observe_failed:  # once: it would be said for every batch
                self._observe_failed = True
                log.error("observe=%r of the queue failed: %s: %s", self._observe, type(exc).__name__, exc)
