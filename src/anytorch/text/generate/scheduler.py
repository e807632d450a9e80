"""The worker: computes the tokens of all requests, in turns and where the model allows it in one batch.

In every round each prompt that is not read yet goes on by its share of a portion, and every other request gets one
token. Nobody waits for a whole answer of somebody else. Requests beyond `most_at_once` wait in line.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from anytorch import logs
from anytorch.counts import counted
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import OutOfMemory, QueueFull, UsageError
from anytorch.text.generate.requests import Computed, TextRequest, Tokens, Way
from anytorch.text.generate.sampling import next_token
from anytorch.workers import start

log = logs.logger(__name__)

PORTION = 512  # tokens of prompts that are computed in one round: more would hold up the others
LEAST = 32  # of one prompt: fewer would cost as much
READ_S = 0.25  # that reading a portion may take while others wait for their next token
CALL_S = 0.02  # that a call for several tokens may take: so long a new request waits, and so often text appears
MOST_STEPS = 256  # of such a call
IDLE_S = 2.0  # after which the worker ends; the next request starts another

Compute = Callable[[list[TextRequest]], Computed]


@dataclass(frozen=True)
class GenerationStats:
    """Counts since the generator was made, and what is under way now."""

    requests: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0  # computations that made tokens: `tokens / steps` is how many requests shared one
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0  # refused because too many were waiting
    running: int = 0
    waiting: int = 0


class Scheduler:
    """`submit` puts a request in line; its mailbox gets the tokens. `close` ends everything."""

    def __init__(
        self,
        way: Way,
        *,
        most_at_once: int,
        most_waiting: int,
        guard: Callable[[], Any],
    ) -> None:
        self._way, self._guard = way, guard
        self._most_at_once, self._most_waiting = most_at_once, most_waiting
        self._changed = threading.Condition()  # guards all below, except what the worker alone uses
        self._waiting: deque[TextRequest] = deque()
        self._running: list[TextRequest] = []
        self._closing = False
        self._worker: threading.Thread | None = None
        self._steps = 1  # of the next call for several tokens
        self._token_s = 0.0  # that a prompt's token took, the last time; 0: none was read yet
        self._stats = GenerationStats()

    # --- asking ----------------------------------------------------------------------------------------------------

    def submit(self, request: TextRequest) -> None:
        with self._changed:
            if self._closing:
                raise UsageError("the text generator is closed")
            if len(self._waiting) >= self._most_waiting:
                self._count(rejected=1)
                waiting = counted(len(self._waiting), "request for text is", "requests for text are")
                raise QueueFull(
                    f"queue full: {waiting} waiting; the limit is {self._most_waiting:,}", hint="try again later"
                )
            # First, and kept once it runs: nobody waits for a thread that was refused, or for one of the parent of a fork.
            if self._worker is None or not self._worker.is_alive():
                worker = threading.Thread(target=self._work, name="anytorch-generate", daemon=True)
                start(worker)
                self._worker = worker
            self._waiting.append(request)
            self._count(requests=1, prompt_tokens=request.prompt_length)
            self._changed.notify_all()

    @property
    def stats(self) -> GenerationStats:
        with self._changed:
            return replace(self._stats, running=len(self._running), waiting=len(self._waiting))

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    def close(self) -> None:
        """Cancel waiting and running requests, and let go of the model. May be called twice."""
        with self._changed:
            self._closing = True
            for request in (*self._waiting, *self._running):
                request.cancelled = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join()
        self._way.close()

    # --- the worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._admitted():
            try:
                with self._guard():
                    self._round()
            except Exception as exc:  # noqa: BLE001  (our own mistake: nobody may be left waiting for it)
                log.error("the text generator's worker failed: %s: %s", type(exc).__name__, exc)
                for request in list(self._running):
                    self._ended(request, "cancelled", exc)

    def _admitted(self) -> bool:
        """Wait a while for work; False if there is none and this thread should end."""
        with self._changed:
            while True:
                while self._waiting and len(self._running) < self._most_at_once:
                    self._running.append(self._waiting.popleft())
                if self._running:
                    return True
                if self._closing or not self._changed.wait(IDLE_S):
                    if self._waiting:
                        continue
                    self._worker = None
                    return False

    def _round(self) -> None:
        now = time.perf_counter()
        with self._changed:
            late = [r for r in self._waiting if r.cancelled or (r.deadline is not None and now >= r.deadline)]
            for request in late:
                self._waiting.remove(request)
        for request in (*late, *self._running):
            if request.cancelled:
                self._ended(request, "cancelled")
            elif request.deadline is not None and now >= request.deadline:
                waited = now - request.arrived
                self._ended(request, "cancelled", TimeoutError(f"the text was not finished within {waited:.3g} s"))
        readers = [r for r in self._running if r.reading]
        waits = len(readers) < len(self._running)
        portion = min(PORTION, int(READ_S / self._token_s)) if waits and self._token_s else PORTION
        for request in readers:  # a long prompt does not hold up the short ones behind it
            self._attempt([request], lambda one: self._read(one[0], max(LEAST, portion // len(readers))))
        ready = [r for r in self._running if not r.reading]
        if ready and len(ready) == len(self._running) and (self._several(ready) or self._streamed(ready)):
            return
        together = self._way.together(ready)
        if len(together) < 2:
            together = []
        if together:
            self._attempt(together, self._way.step)
        for request in ready:
            if request not in together:
                self._attempt([request], self._way.step)

    def _read(self, request: TextRequest, portion: int) -> Computed:
        """A portion of a prompt; how long a token of it takes is remembered."""
        begun = time.perf_counter()
        count, logits = self._way.read(request, portion)
        if count >= LEAST:
            self._token_s = (time.perf_counter() - begun) / count
        return count, logits

    def _several(self, requests: list[TextRequest]) -> bool:
        """Some tokens for each of these in one call, if the way can do that: few at first, more as long as it is quick."""
        most = min(self._steps, *(request.made for request in requests))
        if most < 1:
            return False
        begun = time.perf_counter()
        try:
            found = self._way.several(requests, most)
        except Exception as exc:  # noqa: BLE001  (one by one it is told whose it is)
            log.info("a call for %d tokens of %d requests failed (%s); one by one then", most, len(requests), exc)
            self._way.undo(requests)
            return False
        if found is None:
            return False
        now = time.perf_counter()
        took, steps = now - begun, max(map(len, found))
        self._steps = max(1, min(2 * most, MOST_STEPS, round(CALL_S / took * steps)))
        with self._changed:  # first: who has read a text finds it counted
            self._count(tokens=sum(map(len, found)), steps=steps)
        for request, ids in zip(requests, found, strict=True):
            request.length += len(ids)
            for _ in () if request.sampling.greedy else ids:
                request.points.take()  # what chance decided by
            self._say(request, ids, begun + took / steps, now)
        return True

    def _say(self, request: TextRequest, ids: list[int], first: float, last: float) -> None:
        """Hand new tokens to whoever reads, and end the request where they end it."""
        failed, over = ids[-1] < 0, ids[-1] in request.ends
        ids = ids[:-1] if failed or over else ids
        request.tokens += ids
        if ids:
            request.mailbox.put(Tokens(tuple(ids), first, last))
        if failed:
            self._ended(request, "cancelled", ArithmeticError("the model computed NaN or infinity"))
        elif over:
            self._ended(request, "stop")
        elif request.made >= request.max_tokens:
            self._ended(request, "length")

    def _streamed(self, requests: list[TextRequest]) -> bool:
        """Give all running requests tokens until a request comes or goes. False: they are to be computed step by step."""
        if any(request.sampling.repetition_penalty != 1.0 for request in requests):
            return False
        try:
            made = self._way.tokens(requests)
            if made is None:
                return False
            with closing(made):
                for tokens in made:
                    now, over = time.perf_counter(), self._wanted_elsewhere(requests)
                    if over or any(map(_is_last, requests, tokens)):
                        over = True
                        made.close()  # before anybody's memory is given to others
                    with self._changed:
                        self._count(tokens=len(tokens), steps=1)
                    for request, token in zip(requests, tokens, strict=True):
                        request.length += 1
                        if not request.sampling.greedy:
                            request.points.take()  # what chance decided by
                        self._say(request, [token], now, now)
                    if over:
                        break
        except Exception as exc:  # noqa: BLE001  (each by itself, as the next lines do it, finds the culprit)
            log.info("%d requests together failed (%s); they go on step by step", len(requests), exc)
            self._way.undo(requests)
            return False
        return True

    def _wanted_elsewhere(self, requests: Sequence[TextRequest]) -> bool:
        """Whether one of these was cancelled or ran out of time, or there is room for one that waits."""
        if self._closing or (self._waiting and len(self._running) < self._most_at_once):
            return True
        now = time.perf_counter()
        return any(r.cancelled or (r.deadline is not None and now >= r.deadline) for r in requests)

    def _attempt(self, requests: list[TextRequest], compute: Compute) -> None:
        """Compute for these; if that fails, for each alone, so that only the culprit gets the error.

        Until the numbers have been looked at no request has changed: a device may report only then that it failed.
        """
        try:
            count, logits = compute(requests)
            outlook = None if logits is None else Outlook.of(requests, logits)
        except Exception as exc:  # noqa: BLE001  (whatever it is, it is the request's answer)
            if len(requests) == 1:
                self._ended(requests[0], "cancelled", _ours(exc, requests[0]))
                return
            log.info("a batch of %d requests failed (%s); each is computed by itself", len(requests), exc)
        else:
            for request in requests:
                request.length += count
            if outlook is not None:
                self._choose(requests, outlook)
            return
        self._way.undo(requests)
        for request in requests:
            self._attempt([request], compute)

    def _choose(self, requests: Sequence[TextRequest], outlook: Outlook) -> None:
        """A token for each. A failure here is that of one request: the others' keys and values are as they should be."""
        now = time.perf_counter()
        made = 0
        for row, request in enumerate(requests):
            if not outlook.finite[row]:
                self._ended(request, "cancelled", ArithmeticError("the model computed NaN or infinity"))
                continue
            try:
                token = outlook.token(row, request)
            except Exception as exc:  # noqa: BLE001  (whatever it is, it is the request's answer)
                self._ended(request, "cancelled", _ours(exc, request))
                continue
            with self._changed:
                self._count(tokens=1, steps=made == 0)
            made += 1
            self._say(request, [token], now, now)

    def _ended(self, request: TextRequest, reason: Any, error: BaseException | None = None) -> None:
        with self._changed:
            if request in self._running:
                self._running.remove(request)
            self._count(failed=error is not None, cancelled=error is None and reason == "cancelled")
        self._way.leave(request)
        request.end(reason, error)


@dataclass(frozen=True)
class Outlook:
    """What a computation says about the next token of each request. Its numbers are on the host: the device is done."""

    logits: torch.Tensor  # [requests, vocabulary]
    best: list[int]  # the most likely token of each; empty where nobody asks for it
    finite: list[bool]

    @staticmethod
    def of(requests: Sequence[TextRequest], logits: torch.Tensor) -> Outlook:
        best = logits.argmax(-1).tolist() if any(r.sampling.greedy for r in requests) else []
        return Outlook(logits, best, torch.isfinite(logits.amax(-1)).tolist())

    def token(self, row: int, request: TextRequest) -> int:
        if request.sampling.greedy and request.sampling.repetition_penalty == 1.0:
            return self.best[row]
        return next_token(self.logits[row], request.sampling, request.tokens, request.points)


def _is_last(request: TextRequest, token: int) -> bool:
    return token in request.ends or request.made + 1 >= request.max_tokens


def _ours(exc: Exception, request: TextRequest) -> Exception:
    if isinstance(exc, OutOfMemory) or not is_out_of_memory(exc):
        return exc
    error = OutOfMemory(
        f"memory ran out after {request.length} tokens of this request: {exc}",
        hint="use a shorter prompt or fewer tokens, quantization='int4', or device_budget=…",
    )
    error.__cause__ = exc
    return error
