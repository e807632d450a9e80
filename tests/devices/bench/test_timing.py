"""The clock: a fake one, so that what is asserted is arithmetic and not a time."""

from __future__ import annotations

import os

import pytest

from anytorch.devices.bench import timing
from anytorch.devices.bench.others import OtherWork
from anytorch.devices.bench.results import busy_words
from anytorch.devices.bench.timing import LEAST_SAMPLES, MOST_SAMPLES, measure, quickest, summarise


class Clock:
    """Time passes only when a run says so."""

    def __init__(self, run_s: float) -> None:
        self.now, self.run_s, self.runs, self.waits = 0.0, run_s, 0, 0

    def __call__(self) -> float:
        return self.now

    def run(self) -> None:
        self.runs += 1
        self.now += self.run_s

    def wait(self) -> None:
        self.waits += 1


def test_a_long_run_is_timed_until_the_budget_is_spent() -> None:
    clock = Clock(0.010)
    found = measure(clock.run, clock.wait, budget_s=0.1, clock=clock)
    assert found.median_s == pytest.approx(0.010)
    assert found.inner == 1
    assert clock.now == pytest.approx(0.1, abs=0.011)


def test_short_runs_are_timed_several_at_a_time_with_one_wait_each() -> None:
    clock = Clock(1e-6)
    found = measure(clock.run, clock.wait, budget_s=0.02, clock=clock)
    assert found.inner == 1000
    assert found.median_s == pytest.approx(1e-6)
    assert clock.waits < clock.runs / 100


def test_a_run_longer_than_the_budget_is_timed_once_warm() -> None:
    clock = Clock(5.0)
    found = measure(clock.run, clock.wait, budget_s=0.1, clock=clock)
    assert clock.runs == 2  # the warm-up, and the one that counts
    assert found.repeats == 1 and found.spread_s == 0.0


def test_iterations_are_exact_whatever_the_budget() -> None:
    clock = Clock(1e-6)
    measure(clock.run, clock.wait, budget_s=1e-9, iterations=7, clock=clock)
    assert clock.runs == 8


def test_the_number_of_samples_is_bounded() -> None:
    clock = Clock(0.002)
    assert measure(clock.run, clock.wait, budget_s=1e6, clock=clock).repeats <= MOST_SAMPLES


def test_samples_with_an_interruption_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 ms is what a 0.1 ms product took here when another process held a core (measured on 2 cores, 2026-11-15)."""
    clock, interruptions = Clock(0.002), [0]

    def run() -> None:
        disturbed = clock.runs % 3 == 2
        clock.run()
        if disturbed:
            clock.now += 0.006
            interruptions[0] += 1

    monkeypatch.setattr(timing, "count_interruptions", lambda: interruptions[0])
    found = measure(run, clock.wait, budget_s=0.1, clock=clock)
    assert found.median_s == pytest.approx(0.002) and found.spread_s == pytest.approx(0.0)
    assert found.disturbed > 0


def test_where_no_sample_is_quiet_windows_of_several_turns_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that lets a 1 ms product run for 4 ms and then holds it up for 36: samples see one or the other."""
    clock, interruptions = Clock(0.001), [0]

    def run() -> None:
        clock.run()
        interruptions[0] += 1
        if clock.runs % 4 == 0:
            clock.now += 0.036

    monkeypatch.setattr(timing, "count_interruptions", lambda: interruptions[0])
    found = measure(run, clock.wait, budget_s=0.01, clock=clock)
    assert found.median_s == pytest.approx(0.010, rel=0.15)  # what it gets, not the 0.001 of most samples
    assert found.repeats == LEAST_SAMPLES == found.disturbed
    quiet = measure(run, clock.wait, budget_s=0.01, iterations=3, clock=clock)
    assert quiet.repeats == 3, "a number of runs is exact"


def test_other_work_is_noticed_and_told() -> None:
    assert busy_words({"other_cores": 0.1, "disturbed": 0.0}) == busy_words({}) == ""
    assert "1.3 of its cores" in busy_words({"other_cores": 1.3, "disturbed": 0.0})
    assert "40% of the rows" in busy_words({"other_cores": None, "disturbed": 0.4})
    before = OtherWork()
    assert before.cores() is None
    before.begin()
    assert before._activity is not None
    before._activity.cpu_share = lambda: 0.75  # type: ignore[method-assign]
    before._wall -= 10.0
    cores = os.cpu_count() or 1
    assert before.cores() == pytest.approx(0.75 * cores, abs=0.1)


def test_with_too_few_quiet_samples_all_count() -> None:
    found = summarise([1.0, 2.0, 3.0, 4.0], quiet=[1.0] * (LEAST_SAMPLES - 1))
    assert found.median_s == 2.5 and found.repeats == 4
    assert found.spread_s == pytest.approx(1.5)


def test_quickest_warms_up_and_ends() -> None:
    runs: list[int] = []
    assert quickest(lambda: runs.append(1), lambda: None, patience_s=0.01) >= 0
    assert len(runs) >= 2
