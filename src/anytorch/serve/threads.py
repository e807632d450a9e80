"""Threads for work that must not hold up the event loop: bounded pools, one for each kind of work, that health watches.

A deadline, or a client that leaves, ends the waiting and not the work: nothing can stop a thread. So the threads of one kind
of work are never those of another, what waits for one is bounded, abandoned work ends at its next check
(`go_on`), and a request's share of memory (`Call`) is given back when its last thread has ended. The threads are daemons:
the process ends without them.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, Protocol, TypeVar

from anytorch.serve.problems import Problem, retry_after

T = TypeVar("T")
STUCK_S = 30.0  # a pool whose threads have all been busy for so long does not work any more
MOST_WAITING = 512  # for a thread of one pool: more than the queues of prompts and of candles have room for
IDLE_S = 10.0  # a thread without work ends


class Holder(Protocol):
    """A request, which holds its memory while a thread works for it."""

    threads: int

    def thread_ended(self) -> None: ...


# The request that the current task works for; set by the guard.
HOLDER: ContextVar[Holder | None] = ContextVar("anytorch_request", default=None)
# The thread's job: weakly, because the job has the context that this is set in, and a cycle keeps a request's data.
_current: ContextVar[weakref.ref[Job] | None] = ContextVar("anytorch_job", default=None)


class Abandoned(Exception):
    """Nobody waits for this work any more."""


def go_on() -> None:
    """Raise Abandoned in a thread whose work nobody waits for any more. Called between the parts of long work."""
    if _abandoned():  # no job in this frame, which the error's traceback has
        raise Abandoned


def _abandoned() -> bool:
    current = _current.get()
    job = None if current is None else current()
    return job is not None and job.abandoned


class Job:
    """One call of a function, from its order to its end."""

    __slots__ = ("__weakref__", "_context", "_function", "abandoned", "answer", "began", "name")

    def __init__(self, function: partial[Any]) -> None:
        self._function, self._context = function, copy_context()
        self.name = getattr(function.func, "__qualname__", type(function.func).__name__)
        self.answer: Future[Any] = Future()
        self.began: float | None = None
        self.abandoned = False

    def run(self, ended: Callable[[], None]) -> None:
        """Call the function, unless it was withdrawn, then `ended`; the result goes to whoever awaits it."""
        if not self.answer.set_running_or_notify_cancel():
            ended()
            return
        try:
            result = self._context.run(_call, weakref.ref(self), self._function)
        except BaseException as exc:  # noqa: BLE001  (raised again where it is awaited)
            ended()
            self.answer.set_exception(_awaitable(exc))
            del self, ended  # the error's traceback has this frame: through the job it would hold itself
        else:
            ended()
            self.answer.set_result(result)


def _awaitable(exc: BaseException) -> BaseException:
    """The error itself, or a RuntimeError that it caused if it is one that a coroutine cannot be given."""
    if not isinstance(exc, StopIteration):
        return exc
    told = RuntimeError("the function raised StopIteration")
    told.__cause__ = exc
    return told


def _call(job: weakref.ref[Job], function: partial[Any]) -> Any:
    _current.set(job)
    return function()


def _refused(job: Job, why: str) -> Problem:
    """The problem for a job that cannot be taken; its answer is withdrawn, so that its request holds nothing for it."""
    job.answer.cancel()
    job.answer.set_running_or_notify_cancel()
    return Problem(503, "busy", "Too many requests at once", why, hint="try again later", headers=retry_after())


class Threads:
    """A pool of at most `most` threads for one kind of work."""

    def __init__(
        self, name: str, most: int, *, stuck_s: float = STUCK_S, waiting: int = MOST_WAITING, holds: bool = True
    ) -> None:
        """`holds`: a request holds its memory while its work is done here."""
        self.name, self.most, self._stuck_s, self._most_waiting, self._holds = name, most, stuck_s, waiting, holds
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._threads = 0
        self._idle = 0

    async def run(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """The result of a function, called in a thread. Cancelling it withdraws what has not begun.

        Raises a 503 Problem where too much waits for a thread already, or no thread can be started.
        """

        job = Job(partial(function, *arguments, **options))
        holder = HOLDER.get() if self._holds else None
        loop = asyncio.get_running_loop()
        if holder is not None:
            holder.threads += 1
            job.answer.add_done_callback(lambda _: _later(loop, holder.thread_ended))
        self._order(job)
        try:
            found: T = await asyncio.wrap_future(job.answer)
        except asyncio.CancelledError:
            job.abandoned = True
            with self._changed:
                if job in self._waiting:
                    self._waiting.remove(job)
            raise
        finally:
            del job  # an error's traceback has this frame, and the job has the error
        return found

    def _order(self, job: Job) -> None:
        with self._changed:
            if len(self._waiting) >= self._most_waiting:
                raise _refused(job, f"{len(self._waiting)} requests already wait for a thread")
            self._waiting.append(job)
            self._changed.notify()
            # One that was woken is idle until it has taken its work.
            if len(self._waiting) > self._idle and self._threads < self.most:
                try:
                    threading.Thread(target=self._work, name=f"anytorch-{self.name}", daemon=True).start()
                except (RuntimeError, MemoryError) as exc:  # the system has no more for this process
                    if not self._threads:  # else one of those there will do it
                        self._waiting.remove(job)
                        raise _refused(job, f"no thread for {self.name} can be started") from exc
                else:
                    self._threads += 1  # before it looks: it needs the lock for that

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run(partial(self._end, job))
            del job  # and what it holds, while this thread waits for the next

    def _end(self, job: Job) -> None:
        """Free the thread before the result is delivered, so that its receiver finds the thread free."""
        with self._changed:
            self._running.discard(job)

    def _next(self) -> Job | None:
        """The next job, which now runs; None: there was none for a while, and this thread ends."""
        with self._changed:
            self._idle += 1
            try:
                while not self._waiting:
                    if not self._changed.wait(IDLE_S) and not self._waiting:
                        self._threads -= 1
                        return None
            finally:
                self._idle -= 1
            job = self._waiting.popleft()
            job.began = time.monotonic()
            self._running.add(job)
            return job

    def running(self) -> list[Job]:
        """The calls that have begun and not ended."""
        with self._changed:
            return list(self._running)

    def stuck(self) -> str:
        """Why nothing gets a thread any more: all have been busy for too long. "" if all is well."""
        now = time.monotonic()
        ages = [now - job.began for job in self.running() if job.began is not None]
        if len(ages) < self.most or min(ages) < self._stuck_s:
            return ""
        return f"all {self.most} threads for {self.name} have been busy for {min(ages):.0f} s or more"


class Pools:
    """The service's threads by kind of work, so that none can take those of another."""

    def __init__(self, longest_s: float = 0.0, queued_tokens: int = 0) -> None:
        """`longest_s`: the time limit of a request; work that takes longer has nobody waiting for it.
        `queued_tokens`: what the queue of texts has room for. A request brings it one at least, so that as many may wait
        here: the queue says when it is full. Their bodies are counted by the guard.
        """
        stuck_s = max(STUCK_S, longest_s)
        cores = os.cpu_count() or 1
        self.texts = Threads("texts", min(32, cores + 4), stuck_s=stuck_s, waiting=max(MOST_WAITING, queued_tokens))
        self.prompts = Threads("prompts", 4, stuck_s=stuck_s)
        self.candles = Threads("candles", 4, stuck_s=stuck_s)
        self.questions = Threads("questions", 8, stuck_s=stuck_s)  # metrics, devices, lists of models
        # Loading takes minutes, and an engine that is closed finishes its work first: neither is stuck.
        # One load at a time: two engines that are built at once would both measure a busy machine.
        self.loading = Threads("loading", 1, stuck_s=math.inf, holds=False)
        self.closing = Threads("closing", 8, stuck_s=math.inf, holds=False)

    def every(self) -> tuple[Threads, ...]:
        return self.texts, self.prompts, self.candles, self.questions, self.loading, self.closing

    def stuck(self) -> str:
        """Why a kind of work is not done any more; "" if all is well."""
        return next((why for pool in self.every() if (why := pool.stuck())), "")

    def wait(self, seconds: float) -> None:
        """Wait until nothing is computed any more, for as long as this."""
        last = time.monotonic() + seconds
        while self.unfinished() and time.monotonic() < last:
            time.sleep(0.01)

    def unfinished(self) -> list[str]:
        """What is still being computed, in words."""
        return [f"{pool.name}: {job.name}" for pool in self.every() for job in pool.running()]


def _later(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:  # the loop has been closed: nobody counts any more
        pass
