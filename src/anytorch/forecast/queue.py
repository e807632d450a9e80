"""Forecasts for many clients: one worker computes waiting requests with the same terms in one batch.

Requests with a seed are computed alone: a batch's draws depend on the series in it, and the same seed must give the same
forecast.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from anytorch import logs
from anytorch.counts import counted
from anytorch.errors import QueueClosed, QueueFull
from anytorch.workers import start

log = logs.logger(__name__)

MOST_WAITING = 64  # requests
MOST_PATHS = 512  # in one batch: series times samples
FADE = 0.7  # of what earlier batches say about the speed, with every new one
STEPS_TO_KNOW = 8  # of a batch, before it says how long a step takes


@dataclass(frozen=True)
class Terms:
    """What requests must share to be computed together."""

    horizon: int
    samples: int
    quantiles: tuple[float, ...]
    temperature: float
    top_p: float
    seed: int | None = None


class Answer(Future[Any]):
    """A pending forecast. Cancelling it removes the request, or stops its computation if no other request needs it."""

    abandoned = False

    def cancel(self) -> bool:
        self.abandoned = True
        return super().cancel()


class Abandoned(Exception):
    """Raised inside a computation whose requests were all cancelled."""


@dataclass(eq=False)
class PendingForecast:
    history: Any  # a DataFrame
    terms: Terms
    ahead: Any = None  # the times to forecast; None: continued from the history, which may be too short to know them
    future: Answer = field(default_factory=Answer)

    @property
    def size(self) -> int:
        return self.terms.horizon * self.terms.samples


class Pace:
    """The shortest measured time of a step, by its number of paths; the work before the steps is not counted."""

    def __init__(self) -> None:
        self._step_s: dict[int, float] = {}

    def least_s(self, terms: Terms) -> float:
        """A lower bound of a forecast's seconds: a step with more paths is never shorter. 0 if nothing was measured."""
        known = [seconds for paths, seconds in self._step_s.items() if paths <= terms.samples]
        return terms.horizon * max(known, default=0.0)

    def seen(self, paths: int, moments: list[float]) -> None:
        """The first and the last step of a batch, and those between them."""
        if len(moments) < STEPS_TO_KNOW:
            return
        step_s = (moments[-1] - moments[0]) / (len(moments) - 1)
        self._step_s[paths] = min(step_s, self._step_s.get(paths, step_s))


class ForecastQueue:
    """A worker thread in front of a predictor."""

    def __init__(
        self, predictor: Any, *, most_waiting: int = MOST_WAITING, most_waiting_s: float | None = None
    ) -> None:
        self._predictor = predictor  # a KronosPredictor, or whatever has its forecast_batch
        self._most = most_waiting
        self._most_s = most_waiting_s  # what waits may take so long, by the speed of what was computed; then it is full
        # Of the last few batches together: a small one, which is mostly overhead, says little about a large one.
        self._seconds, self._sizes = 0.0, 0.0
        self._pace = Pace()
        self._changed = threading.Condition()
        self._jobs: deque[PendingForecast] = deque()
        self._closing = False
        self._worker = threading.Thread(target=self._work, name="anytorch-forecast", daemon=True)
        start(self._worker)

    def submit(self, history: Any, terms: Terms, timeout_s: float | None = None, *, ahead: Any = None) -> Future[Any]:
        """Queue a forecast and return it pending. Raises QueueFull, or TimeoutError if `timeout_s` cannot be met.

        The latter would keep the worker from everybody else until its time was up, for nothing.
        """
        job = PendingForecast(history, terms, ahead)
        with self._changed:
            least_s = self._pace.least_s(terms)
            if timeout_s is not None and least_s > timeout_s:
                raise TimeoutError(
                    f"{terms.horizon} steps take at least {least_s:.0f} s here; the request's time limit is {timeout_s:g} s"
                )
            if self._closing:
                raise QueueClosed("the forecasting model is closing")
            self._drop_cancelled()
            if len(self._jobs) >= self._most:
                waiting = counted(len(self._jobs), "forecast is waiting", "forecasts are waiting")
                raise QueueFull(f"queue full: {waiting}; the limit is {self._most:,}", hint="try again later")
            seconds = self._seconds / max(self._sizes, 1.0) * sum(other.size for other in self._jobs)
            if self._most_s is not None and seconds > self._most_s:
                raise QueueFull(f"queue full: the waiting forecasts take about {seconds:.0f} s", hint="try again later")
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    @property
    def waiting(self) -> int:
        with self._changed:
            self._drop_cancelled()
            return len(self._jobs)

    def _drop_cancelled(self) -> None:
        if any(job.future.abandoned for job in self._jobs):
            self._jobs = deque(job for job in self._jobs if not job.future.abandoned)

    def alive(self) -> str:
        return "" if self._worker.is_alive() or self._closing else "its worker has ended"

    def close(self) -> None:
        """Finish the waiting forecasts and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._worker.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                if not self._jobs:
                    return
                taken = take(self._jobs)
            running = [job for job in taken if job.future.set_running_or_notify_cancel()]
            if running:
                self._compute(running)

    def _compute(self, jobs: list[PendingForecast]) -> None:
        terms = jobs[0].terms
        began = time.perf_counter()
        moments: list[float] = []

        def at_step(done: int, total: int) -> None:
            moments.append(time.perf_counter())
            if all(job.future.abandoned for job in jobs):
                raise Abandoned(f"every request for this forecast was cancelled (step {done} of {total})")

        try:
            found = self._predictor.forecast_batch(
                [job.history for job in jobs],
                y_timestamp_list=[job.ahead for job in jobs],
                pred_len=terms.horizon,
                T=terms.temperature,
                top_p=terms.top_p,
                sample_count=terms.samples,
                seed=terms.seed,
                quantiles=terms.quantiles,
                non_negative_volume=True,
                rescale=True,
                verbose=at_step,
            )
        except Abandoned as exc:
            for job in jobs:
                job.future.set_exception(exc)
            return
        except Exception as exc:  # noqa: BLE001  (whatever it is, it is the requests' answer)
            if len(jobs) == 1:
                jobs[0].future.set_exception(exc)
                return
            log.info("a batch of %d forecasts failed (%s); each is computed by itself", len(jobs), exc)
            for job in jobs:
                self._compute([job])
            return
        finally:  # also of one that was given up: those that are always late would else never be known to be
            with self._changed:
                self._pace.seen(len(jobs) * terms.samples, moments)
        self._seconds = FADE * self._seconds + time.perf_counter() - began
        self._sizes = FADE * self._sizes + sum(job.size for job in jobs)
        for job, forecast in zip(jobs, found, strict=True):
            job.future.set_result(forecast)


def take(waiting: deque[PendingForecast], most_paths: int = MOST_PATHS) -> list[PendingForecast]:
    """Take the oldest job and later ones with the same terms, up to `most_paths`. The others keep their order."""
    first = waiting.popleft()
    taken = [first]
    if first.terms.seed is not None:
        return taken
    for job in list(waiting):
        if job.terms == first.terms and (len(taken) + 1) * first.terms.samples <= most_paths:
            waiting.remove(job)
            taken.append(job)
    return taken
