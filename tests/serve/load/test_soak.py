"""What bench/soak.py takes for a broken bound: it is run by hand for half an hour, so its judgement is tested here."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.serve.load.conftest import ROOT


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("requests")
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("soak")


def good(soak: ModuleType) -> dict[str, Any]:
    tally = soak.Tally()
    for _ in range(99):
        tally.note(200, 0.1)
    tally.note(429, 0.1)
    return {
        "most": {"memory_nbytes": 2**30, "threads": 20, "descriptors": 50},
        "growth": 0.01,
        "clients": {name: tally.summary() for name in ("embeddings", "forecast", "completions", "malformed")},
        "afterwards": {"readyz": 200, "healthz": 200, "under_way": 0.0},
        "end": {"status": 0, "seconds": 2.0},
    }


def judged(soak: ModuleType, report: dict[str, Any], *failed: str) -> list[str]:
    found: list[str] = soak.broken(SimpleNamespace(failed=list(failed)), soak.Bounds(), report)
    return found


def test_a_good_day_breaks_nothing(soak: ModuleType) -> None:
    assert judged(soak, good(soak)) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("most", "memory_nbytes"), 2**40, "memory"),
        (("most", "threads"), 10**4, "threads"),
        (("most", "descriptors"), 10**4, "descriptors"),
        (("growth",), 3.0, "growth"),
        (("growth",), float("nan"), "growth"),
        (("clients", "embeddings", "p99_s"), 100.0, "p99 of embeddings"),
        (("clients", "forecast", "p99_s"), None, "p99 of forecast"),
        (("clients", "completions", "statuses"), {"200": 50, "503": 50}, "completions: 50.0%"),
        (("clients", "malformed", "wrong_count"), 1, "malformed: 1 wrong"),
        (("afterwards", "healthz"), 503, "not healthy"),
        (("afterwards", "under_way"), 1.0, "under way"),
        (("end", "status"), -9, "status -9"),
        (("end", "seconds"), 60.0, "SIGTERM"),
    ],
)
def test_each_broken_bound_is_named(soak: ModuleType, path: tuple[str, ...], value: Any, words: str) -> None:
    report = copy.deepcopy(good(soak))
    report["clients"]["malformed"]["wrong"] = ["POST /x 500"]
    place = report
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    (said,) = judged(soak, report)
    assert words in said


def test_a_client_that_failed_is_a_broken_bound(soak: ModuleType) -> None:
    assert judged(soak, good(soak), "slow: Traceback") == ["slow: Traceback"]


def test_growth_is_that_of_the_surviving_worker_after_the_caches_are_full(soak: ModuleType) -> None:
    filling = [{"survivor_nbytes": size} for size in [*range(1, 101), *[100] * 300]]
    assert soak.growth(filling) == 0.0
    leaking = [{"survivor_nbytes": 100 + n} for n in range(400)]
    assert soak.growth(leaking) > 0.5
    assert soak.growth(leaking[:5]) == 0.0
