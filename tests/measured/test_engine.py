"""The engine with a clock that only runs advance: what is tried, refused, timed, cut short and said."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import anytorch
from anytorch.measured import engine
from anytorch.measured.engine import HOPELESS, Candidate, Ready, measure
from anytorch.measured.stopwatch import Stopwatch, by_wall
from anytorch.measured.verdict import NO_MEMORY, NO_TIME, Question, Trial, Verdict, fastest

QUESTION = Question("kind", "a case", "a device", {"shape": 1})


class Clock:
    """Only work advances it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def work(self, name: str, seconds: float, answer: float = 0.0, **more: Any) -> Candidate:
        def run() -> float:
            self.now += seconds
            self.order.append(name)
            return answer

        return Candidate(name, lambda: Ready(run), **more)

    def stopwatch(self) -> Stopwatch:
        now = lambda: self.now  # noqa: E731
        return Stopwatch(by_wall(lambda: None, now), now=now)


def measured(clock: Clock, *candidates: Candidate, **how: Any) -> Verdict:
    """An answer is its own error."""
    options: dict[str, Any] = {"most_error": 0.01, "budget_s": 1.0, **how}
    found = measure(QUESTION, candidates, lambda answer: answer, stopwatch=clock.stopwatch(), **options)
    assert [one.name for one in found.trials] == [one.name for one in candidates]
    return found


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "count_interruptions", lambda: 0)


# --- time -------------------------------------------------------------------------------------------------------------


def test_each_gets_its_own_time_in_turns() -> None:
    clock = Clock()
    found = measured(clock, clock.work("a", 0.010), clock.work("b", 0.012), rounds=200)
    assert found.seconds("a") == pytest.approx(0.010) and found.seconds("b") == pytest.approx(0.012)
    assert 0.9 < clock.now <= 1.0, "the budget is used, and kept"
    tail = clock.order[-20:]
    assert tail.count("a") == tail.count("b") == 10, "interleaved, not one after the other"
    assert found.chosen == "a" and not found.cut_short and not found.passing


def test_short_work_is_repeated_until_a_clock_can_tell() -> None:
    clock = Clock()
    found = measured(clock, clock.work("a", 1e-5), clock.work("b", 1.5e-5), rounds=3, sample_s=1e-3)
    assert found.seconds("a") == pytest.approx(1e-5)
    assert clock.order.count("a") == 2 + 2 * 100 and clock.order.count("b") == 2 + 2 * 67


def test_a_hopeless_candidate_does_not_eat_the_budget(undisturbed: None) -> None:
    clock = Clock()
    slow = 0.010 * HOPELESS * 2
    found = measured(clock, clock.work("a", 0.010), clock.work("slow", slow), clock.work("b", 0.011), rounds=200)
    assert clock.order.count("slow") <= 3 < clock.order.count("a")
    assert found.seconds("slow") == pytest.approx(slow) and found.chosen == "a"


def test_slow_only_because_of_other_work_is_not_hopeless_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10**6))
    monkeypatch.setattr(engine, "count_interruptions", lambda: next(count))  # every sample is interrupted
    clock = Clock()
    found = measured(clock, clock.work("a", 0.010), clock.work("b", 0.030), rounds=200)
    trial = found.trial("b")
    assert trial is not None and trial.repeats >= 6 and trial.disturbed >= 6


def test_disturbed_samples_do_not_count_where_others_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, slow = Clock(), iter([0.002, 0.020] + [0.002] * 50)
    count = [0]

    def run() -> float:
        took = next(slow)
        count[0] += took > 0.01
        clock.now += took
        return 0.0

    monkeypatch.setattr(engine, "count_interruptions", lambda: count[0])
    found = measured(clock, Candidate.of("a", run), clock.work("b", 0.0021), rounds=4)
    trial = found.trial("a")
    assert (
        trial is not None and trial.seconds == pytest.approx(0.002) and trial.disturbed == 1 and trial.spread_s < 1e-9
    )


def test_the_wall_time_is_bounded_on_a_slow_device() -> None:
    """A software adapter: every run takes two seconds, and there are three."""
    clock = Clock()
    names = [f"way {number}" for number in range(9)]
    found = measured(clock, *(clock.work(name, 2.0) for name in names), budget_s=3.0)
    assert clock.now <= 4.0 and clock.order == ["way 0"] * 2
    assert found.chosen == "way 0" and found.cut_short
    assert {one.refused for one in found.trials[1:]} == {NO_TIME}
    with anytorch.use(measure_s=30.0):
        longer = measured(Clock(), *(clock.work(name, 2.0) for name in names), budget_s=None)
    assert longer.budget_s == 30.0, "the setting is the default"


def test_candidates_are_tried_until_one_is_right() -> None:
    clock = Clock()
    found = measured(clock, clock.work("wrong", 2.0, 1.0), clock.work("a", 2.0), clock.work("b", 2.0), budget_s=1.0)
    assert found.chosen == "a" and [one.refused for one in found.trials[1:]] == ["", NO_TIME]


def test_rounds_stop_when_the_next_sample_would_come_too_late() -> None:
    clock = Clock()
    measured(clock, clock.work("a", 0.3), clock.work("b", 0.31), rounds=200, budget_s=2.0)
    assert clock.now <= 2.0


def test_the_context_is_in_force_for_every_run() -> None:
    inside: list[bool] = []
    active = [False]

    @contextmanager
    def scope() -> Iterator[None]:
        active[0] = True
        yield
        active[0] = False

    clock = Clock()

    def run() -> float:
        inside.append(active[0])
        clock.now += 0.1
        return 0.0

    measured(clock, Candidate.of("a", run, scope), clock.work("b", 0.1))
    assert len(inside) > 3 and all(inside) and not active[0]


def test_what_is_timed_may_be_another_thing_than_what_is_checked() -> None:
    clock, closed = Clock(), []

    def replay() -> None:
        clock.now += 0.001

    def run() -> float:
        clock.now += 0.5
        return 0.0

    recorded = Candidate("recorded", lambda: Ready(run, lambda: replay, {"nbytes": 7}, lambda: closed.append(1)))
    found = measured(clock, recorded, clock.work("plain", 0.0015), budget_s=5.0)
    trial = found.trial("recorded")
    assert trial is not None and trial.seconds == pytest.approx(0.001) and trial.facts == {"nbytes": 7}
    assert closed == [1] and found.chosen == "recorded"


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_wrong_answer_is_not_timed_and_says_so() -> None:
    clock = Clock()
    wrong, nonsense = clock.work("wrong", 0.001, 0.5), clock.work("nonsense", 0.001, float("nan"))
    found = measured(clock, clock.work("right", 0.01, 0.001), wrong, nonsense)
    right, off, nan = found.trials
    assert right.error == 0.001 and found.chosen == "right"
    assert off.seconds is None and off.refused == "wrong: off by 0.5 of the answer's size; 0.01 is allowed"
    assert off.error == 0.5 and nan.error is None and "nan" in nan.refused
    assert clock.order.count("wrong") == clock.order.count("nonsense") == 1
    json.dumps(found.as_json(), allow_nan=False)


def test_a_candidate_that_fails_keeps_its_words_and_the_rest_goes_on() -> None:
    def broken() -> float:
        raise RuntimeError("out of registers\nand a long story")

    def full() -> float:
        raise MemoryError

    clock = Clock()
    refused = Candidate("never", lambda: pytest.fail("it was tried"), refused="no compiler", passing=True)
    found = measured(clock, Candidate.of("broken", broken), Candidate.of("full", full), refused, clock.work("a", 0.01))
    reasons = {one.name: (one.refused, one.passing) for one in found.trials}
    assert reasons["broken"] == ("RuntimeError: out of registers", False)
    assert reasons["full"] == (NO_MEMORY, True) and reasons["never"] == ("no compiler", True)
    assert found.chosen == "a" and found.passing and not found.cut_short


def test_nothing_can_be_used() -> None:
    clock = Clock()
    found = measured(clock, clock.work("a", 0.01, 1.0), clock.work("b", 0.01, 2.0))
    assert found.chosen == "" and "none can be used: a: wrong: off by 1" in found.why


def test_an_interrupt_closes_what_was_opened() -> None:
    closed: list[str] = []

    def stop() -> float:
        raise KeyboardInterrupt

    first = Candidate("a", lambda: Ready(lambda: 0.0, close=lambda: closed.append("a")))
    with pytest.raises(KeyboardInterrupt):
        measured(Clock(), first, Candidate.of("b", stop))
    assert closed == ["a"]


# --- deciding and saying ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "noise", "chosen"),
    [
        ([("a", 10.0), ("b", 9.8), ("c", 9.9)], 0.03, "a"),
        ([("a", 10.0), ("b", 9.8), ("c", 9.9)], 0.0, "b"),
        ([("a", 10.0), ("b", 6.0), ("c", 5.0)], 0.03, "c"),
        ([("a", 2.554), ("b", 0.5905), ("c", 0.5874)], 0.03, "b"),
        ([("a", None), ("b", 60.0)], 0.0, "b"),
        ([("a", None), ("b", None)], 0.0, ""),
    ],
)
def test_the_first_of_the_fastest_is_chosen(times: list[Any], noise: float, chosen: str) -> None:
    assert fastest([Trial(name, seconds) for name, seconds in times], noise=noise)[0] == chosen


def test_the_explanation_names_every_candidate() -> None:
    clock = Clock()
    found = measured(clock, clock.work("plain", 0.004), clock.work("quick", 0.002), clock.work("bad", 0.001, 1.0))
    lines = found.explain().splitlines()
    assert lines[0].startswith("kind, a case, on a device: quick (2 ms; next is plain, 4 ms; measured 20")
    assert lines[1:] == [
        "  plain  4 ms",
        "  quick  2 ms  ← chosen",
        "  bad    not used: wrong: off by 1 of the answer's size; 0.01 is allowed",
    ]
    assert found.speedup == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("how", "wrong", "footer"),
    [
        ({"most_error": 0.01}, "off by 30 % of what is allowed", ["  allowed: 0.01 of the answer's size"]),
        (
            {"most_error": 0.5, "error_unit": "below a cosine of 1"},
            "off by 0.6 % of what is allowed",
            ["  allowed: 0.5 below a cosine of 1"],
        ),
        ({"most_error": float("inf")}, "off by 3.0e-03 of the answer's size", []),
    ],
)
def test_an_error_is_told_with_what_is_allowed(how: dict[str, Any], wrong: str, footer: list[str]) -> None:
    clock = Clock()
    found = measured(clock, clock.work("exact", 0.004), clock.work("near", 0.002, 0.003), **how)
    for one in (found, Verdict.from_json(json.loads(json.dumps(found.as_json(), allow_nan=False)))):
        assert one.explain().splitlines()[1:] == ["  exact  4 ms", f"  near   2 ms, {wrong}  ← chosen", *footer]


def test_a_wrong_answer_is_refused_in_the_checks_own_words() -> None:
    clock = Clock()
    found = measured(clock, clock.work("a", 0.1), clock.work("b", 0.1, 9.0), most_error=8, error_unit="times eager's")
    assert found.trials[1].refused == "wrong: off by 9 times eager's; 8 is allowed"


def test_a_verdict_of_another_day_says_what_its_errors_are_of() -> None:
    body = Verdict(QUESTION, (Trial("a", 1.0, error=0.5),), "a", "the only one").as_json()
    for name in ("most_error", "error_unit", "hurried"):
        del body[name]
    found = Verdict.from_json(body)
    assert found.explain().endswith("  a  1 s, off by 5.0e-01 of the answer's size  ← chosen") and not found.cut_short


@pytest.mark.parametrize(("after_s", "heard"), [(0.02, True), (5.0, False)])
def test_slow_measuring_is_said(
    after_s: float, heard: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "SAID_AFTER_S", after_s)
    with caplog.at_level(logging.WARNING, logger="anytorch"):
        measure(QUESTION, [Candidate.of("a", lambda: time.sleep(0.1) or 0.0)], float, most_error=0.0, budget_s=0.05)
    assert ("measuring what is fastest on a device: kind, a case (at most about 0.05 s" in caplog.text) == heard


@pytest.mark.parametrize("quiet", [True, False])
def test_a_quiet_measurement_says_nothing(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "SAID_AFTER_S", 0.01)
    slow: Callable[[], float] = lambda: time.sleep(0.05) or 0.0  # noqa: E731
    with caplog.at_level(logging.WARNING, logger="anytorch"):
        measure(QUESTION, [Candidate.of("a", slow)], float, most_error=0.0, budget_s=0.05, quiet=quiet)
    assert bool(caplog.text) != quiet
