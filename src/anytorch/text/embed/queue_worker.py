"""The thread behind a queue: it takes batches of waiting requests, has the engine compute them, and answers.

If a batch fails, its requests are computed one by one and only the culprit gets the error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytorch import logs
from anytorch.text.embed.queue_line import Batch, EmbedRequest, WaitingLine, joined, seconds_until, tokens_of

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


class QueueWorker:
    """`batch_tokens` None: the engine's own. `max_wait_s`: how long a request may wait for company, if there was any."""

    def __init__(
        self,
        engine: ArrowEngine,
        line: WaitingLine,
        *,
        batch_tokens: int | None,
        max_wait_s: float,
        observe: Observe | None,
    ) -> None:
        self._engine, self._line = engine, line
        self._batch_tokens, self._max_wait_s = batch_tokens, max_wait_s
        self._observe = observe
        self._observe_failed = False  # and that was said
        self._company = 0  # requests in the last batch
        self._ended = 0.0  # when the last batch was done
        self._began: float | None = None  # when the batch was started that is waited for
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the worker thread if needed; called with the line's lock held."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="anytorch-queue", daemon=True)
            self.thread.start()

    def join(self) -> None:
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def stuck(self, after_s: float) -> str:
        with self._line.changed:
            began, thread = self._began, self.thread
            waiting = bool(self._line.requests)
        if began is not None and time.monotonic() - began > after_s:
            return f"a batch has not come back for {time.monotonic() - began:.0f} s"
        if waiting and (thread is None or not thread.is_alive()):
            return "requests are waiting and no worker computes them"
        return ""

    @property
    def _budget(self) -> int:
        return self._batch_tokens or self._engine.batch_tokens

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
                self._compute(batch, self._observed(batch, answer, began))
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
                budget = self._budget
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
                self.thread = None
            return None

    def _started(self, batch: Batch) -> Callable[[], Any]:
        try:
            return self._engine.start_tokens(joined(batch))
        except Exception as exc:  # noqa: BLE001  (raised again where the answer is asked for)
            failure = exc

            def answer() -> Any:
                raise failure

            return answer

    def _compute(self, batch: Batch, answer: Callable[[], Any]) -> None:
        try:
            pooled = answer()
        except Exception as exc:  # noqa: BLE001  (whatever it is, it is the requests' answer)
            if len(batch) == 1:
                self._fail(batch[0][0], exc)
                return
            log.info("a batch of %d requests failed (%s); each is computed by itself", len(batch), exc)
            for one in batch:
                self._compute([one], self._started([one]))
            return
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
        tokens = sum(tokens_of(batch))
        if 2 * tokens < self._budget or seconds <= 0:
            return
        with self._line.changed:
            self._line.count_rate(tokens / seconds)

    # --- answers ---------------------------------------------------------------------------------------------------

    def _answer(self, request: EmbedRequest) -> None:
        try:
            value = self._engine.as_output(request.rows, request.output)
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

    def _observed(self, batch: Batch, answer: Callable[[], Any], began: float) -> Callable[[], Any]:
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
                report = BatchReport(
                    texts=sum(share.end - share.begin for _, share in batch),
                    tokens=sum(tokens_of(batch)),
                    requests=len(batch),
                    waited_s=tuple(began - request.arrived for request, _ in batch),
                    seconds=time.monotonic() - began,
                    failed=failed,
                )
                try:
                    observe(report)
                except Exception as exc:  # noqa: BLE001  (who keeps count wrongly must not cost others their answer)
                    if not self._observe_failed:  # once: it would be said for every batch
                        self._observe_failed = True
                        log.error("observe=%r of the queue failed: %s: %s", observe, type(exc).__name__, exc)

        return observed
