"""Requests for forecasts that wait together: computed together if they ask alike, refused if they cannot be ready."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import pytest

from anytorch.errors import QueueClosed, QueueFull
from anytorch.forecast.queue import ForecastQueue, Pace, PendingForecast, Terms, take


class Fake:
    """A predictor that says which histories it was given together."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()

    def forecast_batch(self, df_list: Any, **options: Any) -> list[str]:
        assert self.gate.wait(120)
        self.batches.append(list(df_list))
        if "bad" in df_list:
            raise ValueError("a bad one")
        return [f"{name} {options['pred_len']}" for name in df_list]


def terms(**changes: Any) -> Terms:
    return Terms(**{"horizon": 3, "samples": 2, "quantiles": (), "temperature": 1.0, "top_p": 1.0, **changes})


def test_alike_requests_are_computed_together() -> None:
    asked = {"a": terms(), "b": terms(horizon=9), "c": terms(), "d": terms(seed=1), "e": terms()}
    waiting = deque(PendingForecast(name, wanted) for name, wanted in asked.items())
    assert [job.history for job in take(waiting)] == ["a", "c", "e"]
    assert [job.history for job in take(waiting)] == ["b"]
    assert [job.history for job in take(waiting)] == ["d"] and not waiting


def test_a_batch_is_bounded_and_seeds_are_alone() -> None:
    waiting = deque(PendingForecast(str(n), terms(samples=100)) for n in range(9))
    assert len(take(waiting, most_paths=512)) == 5
    seeded = deque(PendingForecast(str(n), terms(seed=5)) for n in range(3))
    assert [len(take(seeded)) for _ in range(3)] == [1, 1, 1]


def test_one_bad_request_fails_alone() -> None:
    fake = Fake()
    queue = ForecastQueue(fake)
    first = queue.submit("first", terms())
    rest = [queue.submit(name, terms()) for name in ("good", "bad", "fine")]
    fake.gate.set()
    assert first.result(120) == "first 3" and rest[0].result(120) == "good 3" and rest[2].result(120) == "fine 3"
    with pytest.raises(ValueError, match="a bad one"):
        rest[1].result(120)
    queue.close()


def test_a_cancelled_forecast_is_not_computed_and_the_queue_is_bounded() -> None:
    fake = Fake()
    queue = ForecastQueue(fake, most_waiting=2)
    first = queue.submit("first", terms(horizon=1))
    while queue.waiting:
        threading.Event().wait(0.001)
    gone, kept = queue.submit("gone", terms()), queue.submit("kept", terms())
    with pytest.raises(QueueFull):
        queue.submit("more", terms())
    assert gone.cancel() and not queue.alive()
    fake.gate.set()
    queue.close()
    assert first.result(0) and kept.result(0) == "kept 3"
    assert fake.batches == [["first"], ["kept"]]
    with pytest.raises(QueueClosed):
        queue.submit("late", terms())


class Stepping:
    """A predictor that takes steps until it is told to stop, or enough of them are made."""

    def __init__(self) -> None:
        self.steps = 0

    def forecast_batch(self, df_list: Any, *, pred_len: int, verbose: Any, **_: Any) -> list[str]:
        for step in range(pred_len):
            self.steps += 1
            time.sleep(0.002)
            verbose(step, pred_len)
        return list(df_list)


def test_a_forecast_nobody_waits_for_any_more_ends() -> None:
    stepping = Stepping()
    queue = ForecastQueue(stepping, most_waiting_s=1.0)
    long = queue.submit("long", terms(horizon=100_000))
    while not stepping.steps:
        time.sleep(0.001)
    assert not long.cancel(), "it is being computed"
    assert queue.submit("short", terms(horizon=3)).result(120) == "short"
    assert stepping.steps < 50_000 and isinstance(long.exception(120), Exception)
    running = queue.submit("a", terms(horizon=100_000))
    while queue.waiting:
        time.sleep(0.001)
    waiting = queue.submit("b", terms(horizon=2000))  # four seconds, by what was measured
    with pytest.raises(QueueFull, match="take about"):
        queue.submit("c", terms(horizon=5))
    assert waiting.cancel() and queue.waiting == 0
    running.cancel()
    queue.close()


def test_what_cannot_be_ready_in_time_is_refused_at_once() -> None:
    """It would keep the worker from everybody else until its time was up."""
    stepping = Stepping()
    queue = ForecastQueue(stepping)
    assert queue.submit("unknown", terms(horizon=20, samples=4), 0.01).result(120), "nothing is known yet"
    with pytest.raises(TimeoutError, match=r"10000 steps take at least \d+ s here; the request's time limit is 5 s"):
        queue.submit("long", terms(horizon=10_000, samples=4), 5.0)  # 2 ms at least for each
    given_up = queue.submit("late", terms(horizon=10_000, samples=1))
    enough = stepping.steps + 30
    while stepping.steps < enough:
        time.sleep(0.001)
    given_up.cancel()
    assert isinstance(given_up.exception(120), Exception)
    assert queue.submit("short", terms(horizon=1, samples=1)).result(120), "the worker goes on"
    with pytest.raises(TimeoutError):
        queue.submit("again", terms(horizon=10_000, samples=1), 5.0)  # known from the one that was given up
    queue.submit("possible", terms(horizon=100, samples=4), 500.0).cancel()
    queue.close()


def test_the_pace_is_that_of_the_steps_alone() -> None:
    pace = Pace()
    pace.seen(4, [100.0])
    pace.seen(4, [100.0 + 0.5 * n for n in range(7)])
    assert pace.least_s(terms(horizon=10, samples=4)) == 0, "too few steps to know"
    pace.seen(4, [100.0 + 0.5 * n for n in range(9)])
    pace.seen(4, [200.0 + 0.25 * n for n in range(9)])
    pace.seen(4, [300.0 + 0.75 * n for n in range(9)])
    pace.seen(8, [400.0 + 0.125 * n for n in range(9)])
    assert pace.least_s(terms(horizon=10, samples=4)) == 2.5, "the shortest that was seen"
    assert pace.least_s(terms(horizon=10, samples=9)) == 2.5 and pace.least_s(terms(horizon=10, samples=3)) == 0


class Costly:
    """A predictor that takes 20 ms, however little is asked for, and next to nothing for the rest."""

    def forecast_batch(self, df_list: Any, **_: Any) -> list[str]:
        time.sleep(0.02)
        return list(df_list)


def test_a_small_forecast_does_not_make_the_large_ones_seem_endless() -> None:
    gate = Fake()
    queue = ForecastQueue(Costly(), most_waiting_s=1000.0)  # far more than the large ones take on a busy machine
    queue.submit("large", terms(horizon=1000, samples=20)).result(120)
    queue.submit("small", terms(horizon=1, samples=1)).result(120)  # 20 ms for one number
    queue._predictor = gate
    first = queue.submit("first", terms())
    while queue.waiting:
        time.sleep(0.001)
    waiting = [queue.submit(f"large {n}", terms(horizon=1000 + n, samples=20)) for n in range(20)]
    assert queue.waiting == 20, "by the small one alone they would take more than an hour"
    gate.gate.set()
    assert first.result(120) and all(one.result(120) for one in waiting)
    queue.close()
