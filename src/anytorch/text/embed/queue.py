"""EngineQueue: many callers share one engine; waiting requests are computed together.

A worker thread (`queue_worker`) takes texts from all waiting requests (`queue_line`) up to a token budget (`sharing`), so
that a short request is not held up behind a long one. Texts are tokenized in the caller's thread: bad input is the caller's
error at once and nobody else's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from anytorch.errors import UsageError
from anytorch.text.embed.queue_line import EmbedRequest, QueueStats, WaitingLine
from anytorch.text.embed.queue_worker import Observe, QueueWorker
from anytorch.text.embed.tokens import Tokens, check_iterable

if TYPE_CHECKING:
    from anytorch.text.embed.engine import ArrowEngine


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
        if max_wait_s < 0 or max_waiting_tokens < 1 or (batch_tokens is not None and batch_tokens < 1):
            raise UsageError("max_wait_s must be at least 0, batch_tokens and max_waiting_tokens at least 1")
        if max_waiting_s is not None and not max_waiting_s > 0:
            raise UsageError(f"max_waiting_s={max_waiting_s!r}: use a number of seconds above 0")
        self._engine = engine
        self._line = WaitingLine(max_waiting_tokens, max_waiting_s, refuse=when_full == "raise")
        self._worker = QueueWorker(
            engine, self._line, batch_tokens=batch_tokens, max_wait_s=max_wait_s, observe=observe
        )

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
        return self._worker.stuck(after_s)

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
        self._worker.join()

    def __enter__(self) -> EngineQueue:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _request(
        self, texts: str | Iterable[str], prompt: str | None = None, timeout_s: float | None = None, **wanted: Any
    ) -> EmbedRequest:
        check_iterable(texts)
        single = isinstance(texts, str)
        # The items of an Arrow array are scalars, which are no str.
        listed = [texts] if isinstance(texts, str) else getattr(texts, "to_pylist", partial(list, texts))()
        tokens = self._engine.tokenize(listed, prompt=prompt)
        return EmbedRequest(self._engine, tokens, single=single, timeout_s=timeout_s, **wanted)

    def _admit(self, request: EmbedRequest, *, block: bool) -> None:
        """Let a request in, or have it wait outside; with `block`, return when it is in (or will never be)."""
        if not request.left:
            request.future.set_result(self._engine.as_output(request.rows, request.output))
            return
        with self._line.changed:
            self._line.admit(request)
            self._worker.start()
            self._line.changed.notify_all()
            if block:
                self._line.wait_for_room(request)
