"""Tuning for real, for a fraction of a second; what it decides is the machine's business, its structure is ours."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from anytorch.devices.tune import search
from anytorch.devices.tune.search import SHAPES, Work, busy_notes, thread_candidates, tune
from anytorch.devices.tune.store import Item
from anytorch.errors import UsageError
from anytorch.measured import store
from anytorch.measured.machine import machine_key
from anytorch.measured.verdict import NO_MEMORY, Trial, Verdict
from anytorch.probe.facts import Cpu, as_json

torch = pytest.importorskip("torch")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHAPES", ((2, 16, 64),))
    monkeypatch.setattr(search, "LARGEST_BATCH", 4)


def test_a_plan_has_every_setting_checked_and_leaves_the_process_as_it_was(small: None) -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    steps: list[tuple[int, int, str]] = []
    plan = tune("cpu", duration_s=0.2, progress=lambda *step: steps.append(step))
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before
    told = " ".join(plan.notes)
    for setting in ("threads", "cpu_dtype", "matmul_precision", "batch_size"):
        item = plan.item(setting)
        assert item is not None or setting in told, setting
        if item is None:
            continue
        assert item.option(item.chosen) is not None and item.gain > 0 and item.why
        if setting != "batch_size":
            assert item.option(item.default) is not None
            assert all(o.seconds is None or o.error is not None for o in item.options), "answers are checked"
    assert [step[0] for step in steps] == [0, 1, 2, 3, 4]
    assert plan.machine_key == machine_key() and plan.storage_key == "cpu"
    json.dumps(as_json(plan), allow_nan=False)
    assert {one.question.title: one.chosen for one in store.verdicts()} == {
        f"{item.setting}, {item.workload}": str(item.chosen) for item in plan.items
    }, "and the one store knows it"


def test_a_slow_setting_is_found_out_by_its_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring is faked, the deciding and the chain from it to the settings are not."""

    def fake(question: Any, candidates: Any, *_: Any, **__: Any) -> Verdict:
        # One thread against two, and bf16 against fp32 on an AVX2 CPU, as in shared/research/devices.md (0.7).
        seconds = {"1": 0.0277, "float32": 0.0277, "bfloat16": 2.335, "float16": 2.4, "highest": 0.0277}
        trials = [Trial(one.name, seconds.get(one.name, 0.1), 0.0, 9, 1e-6) for one in candidates]
        return Verdict(question, tuple(trials), "", "")

    monkeypatch.setattr(search, "measure", fake)
    work = Work.on(search.resolve("cpu").chosen)
    work.caps = dataclasses.replace(work.caps, autocast_dtype="bfloat16")
    with work.settled():
        item = work.autocast(0.1)
    assert item.setting == "cpu_dtype" and item.chosen == "float32" and item.gain == pytest.approx(2.335 / 0.0277)


def test_the_batch_stops_growing_where_memory_ends(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "LARGEST_BATCH", 64)
    work = Work.on(search.resolve("cpu").chosen)

    def time_batch(size: int, *, budget_s: float) -> Trial:
        if size > 8:
            torch.empty(2**60, dtype=torch.uint8)  # a real out-of-memory error
        return Trial(str(size), 1.0 / size, 0.0, 5)

    monkeypatch.setattr(work, "time_batch", time_batch)
    item = work.batch(0.1)
    assert item.chosen == 8
    assert [(o.name, o.refused) for o in item.options][-1] == ("16", NO_MEMORY)


def test_an_interrupt_leaves_the_process_as_it_was(small: None) -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()

    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            torch.set_num_threads(before[0] + 1)  # as if a choice had been made
            torch.set_float32_matmul_precision("medium")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune("cpu", duration_s=0.05, progress=stop)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before


CPU = Cpu("x", "y", logical=16, physical=8, affinity=None, quota=None)


@pytest.mark.parametrize(
    ("cpu", "current", "expected"),
    [
        (CPU, 8, [1, 8, 16]),
        (dataclasses.replace(CPU, quota=2.5), 8, [1, 2, 8]),  # 8: physical and torch's own choice are tried too
        (dataclasses.replace(CPU, performance_cores=6, efficiency_cores=2), 8, [1, 6, 8, 16]),
        (dataclasses.replace(CPU, logical=1, physical=1), 1, [1]),
        (dataclasses.replace(CPU, physical=None, affinity=4), 4, [1, 4]),
    ],
)
def test_thread_candidates(cpu: Cpu, current: int, expected: list[int]) -> None:
    assert thread_candidates(cpu, current) == expected


def test_a_busy_machine_is_noted() -> None:
    quiet, busy = Trial("1", 1.0, 0.0, 10), Trial("2", 1.0, 0.0, 10, disturbed=10)
    items = [Item("threads", "w", 1, 1, 1.0, "", (quiet, busy)), Item("cpu_dtype", "w", 1, 1, 1.0, "", (quiet,))]
    assert busy_notes(items[1:]) == []
    assert "while measuring threads:" in busy_notes(items)[0]


@pytest.mark.parametrize("duration_s", [0, -1.0, float("nan")])
def test_a_duration_is_above_zero(duration_s: float) -> None:
    with pytest.raises(UsageError):
        tune("cpu", duration_s=duration_s)


def test_shapes_grow() -> None:
    assert list(SHAPES) == sorted(SHAPES)
