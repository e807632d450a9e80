"""Side-by-side timing with a clock that only runs advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from anytorch.devices.tune import compare as module
from anytorch.devices.tune.compare import HOPELESS, Variant, compare
from anytorch.devices.tune.plan import Option, decide

torch = pytest.importorskip("torch")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str | int] = []

    def __call__(self) -> float:
        return self.now

    def work(self, value: str | int, seconds: float, answer: float = 1.0) -> Variant:
        def run() -> Any:
            self.now += seconds
            self.order.append(value)
            return torch.tensor([answer])

        return Variant(value, run)


def timed(clock: Clock, *variants: Variant, budget_s: float = 1.0, tolerance: float = 0.01) -> dict[Any, Option]:
    reference = torch.tensor([1.0], dtype=torch.float64)
    options = compare(variants, reference, lambda: None, budget_s=budget_s, tolerance=lambda _: tolerance, clock=clock)
    assert [o.value for o in options] == [v.value for v in variants]
    return {o.value: o for o in options}


def test_each_gets_its_own_time_in_turns() -> None:
    clock = Clock()
    found = timed(clock, clock.work("a", 0.010), clock.work("b", 0.012))
    assert found["a"].seconds == pytest.approx(0.010) and found["b"].seconds == pytest.approx(0.012)
    assert clock.now == pytest.approx(1.0, abs=0.03)
    tail = clock.order[-20:]
    assert tail.count("a") == tail.count("b") == 10  # interleaved, not one after the other


def test_a_hopeless_variant_does_not_eat_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "count_interruptions", lambda: 0)
    clock = Clock()
    found = timed(clock, clock.work("a", 0.010), clock.work("slow", 0.010 * HOPELESS * 2))
    assert clock.order.count("slow") <= 3 < clock.order.count("a")
    assert found["slow"].seconds == pytest.approx(0.010 * HOPELESS * 2)
    assert decide("x", "w", "slow", list(found.values())).chosen == "a"


def test_slow_only_because_of_other_work_is_not_hopeless_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(10**6))
    monkeypatch.setattr(module, "count_interruptions", lambda: next(count))  # every sample is interrupted
    clock = Clock()
    found = timed(clock, clock.work("a", 0.010), clock.work("b", 0.030))
    assert found["b"].repeats >= 6 and found["b"].disturbed >= 6


def test_a_wrong_answer_is_not_timed_and_says_so() -> None:
    clock = Clock()
    found = timed(clock, clock.work("a", 0.01), clock.work("b", 0.001, answer=1.5), clock.work("c", 0.1, float("nan")))
    assert found["b"].seconds is None and "wrong: off by 5.0e-01" in found["b"].note and found["b"].error == 0.5
    assert found["c"].seconds is None and found["c"].error is None
    assert found["a"].error == 0.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Verbatim, torch 2.13.0+cpu asked for 2**60 bytes on this machine, 2026-11-15.
        (lambda: torch.empty(2**60, dtype=torch.uint8), "out of memory"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "RuntimeError: mat1 and mat2"),
    ],
)
def test_a_variant_that_fails_keeps_its_words_and_the_rest_goes_on(make: Callable[[], Any], words: str) -> None:
    clock = Clock()
    found = timed(clock, clock.work("a", 0.01), Variant("b", make))
    assert found["a"].seconds and found["b"].seconds is None and words in found["b"].note


def test_the_context_is_in_force_for_every_run() -> None:
    inside: list[bool] = []
    active = [False]

    @contextmanager
    def context() -> Iterator[None]:
        active[0] = True
        yield
        active[0] = False

    clock = Clock()
    variant = clock.work("a", 0.1)
    plain = variant.run

    def run() -> Any:
        inside.append(active[0])
        return plain()

    timed(clock, Variant("a", run, context))
    assert inside and all(inside) and not active[0]
