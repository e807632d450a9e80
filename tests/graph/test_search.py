"""The search's use of its time: what is compiled before the clock is looked at again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from anytorch.graph import search
from anytorch.graph.clock import CALLED_ROUNDS, Clock
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.ir import Builder
from anytorch.graph.lower import lowered
from anytorch.graph.partition import partition
from anytorch.graph.search import AT_ONCE, Search
from tests.graph.cases import CASES

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("batches", "expected"),
    [(0, [AT_ONCE]), (1, [AT_ONCE]), (2, [AT_ONCE, AT_ONCE]), (9, [AT_ONCE, AT_ONCE, 4])],
    ids=["no time", "time for one", "time for two", "time for all"],
)
def test_schedules_are_compiled_a_few_at_once_while_there_is_time(
    few: None, monkeypatch: pytest.MonkeyPatch, batches: int, expected: list[int]
) -> None:
    graph, known = CASES["gated mlp"]()
    cut = partition(graph, known)
    kernel = cut.kernel(cut.groups[0])
    honest = search.back_of(CPU)[0]
    assert honest is not None
    compiled: list[list[str]] = []

    def compile_ahead(kernel: Any, some: Sequence[Schedule], tensors: Any, known: Any) -> None:
        compiled.append([one.name for one in some])

    monkeypatch.setattr(Search, "left_s", property(lambda self: 10.0 * (batches - len(compiled))))
    every = [Schedule({"i0": number}) for number in range(1, 2 * AT_ONCE + 5)]
    back = replace(honest, compile_ahead=compile_ahead)
    ready = Search(graph, known, CPU, 60)._compiled(back, kernel, every, [])
    assert [len(one) for one in compiled] == expected
    names = [one.name for one in every[: sum(expected)]]
    assert [name for one in compiled for name in one] == names and ready == set(names)


def test_a_program_that_the_host_launches_slower_than_eager_torch_is_refused(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that records is timed without launches; under torch.compile nobody records."""
    graph, known = CASES["gated mlp"]()
    monkeypatch.setattr(
        Clock, "times_when_called", lambda clock, runs, beside: dict(zip(runs, (1.2, 0.9), strict=False))
    )
    found = Search(graph, known, CPU, 60, quick=True).run()
    assert found.verdict is not None
    said = {one.name: one.refused for one in found.verdict.trials}
    assert "1.20 times eager torch's time, launches and all" in said.values()
    assert found.verdict.chosen not in [name for name, why in said.items() if why]


def test_calls_are_timed_in_turns_where_a_device_records(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(CPU)
    assert clock.times_when_called({"ours": lambda: None}, lambda: None) == {}  # its stopwatch times calls
    took = {"ours": 3e-4, "eager": 1e-4}
    called: list[str] = []

    def seconds(run: Any, count: int) -> float:
        called.append(run())
        return took[called[-1]]

    monkeypatch.setattr(clock, "_records", True)
    monkeypatch.setattr(clock, "plain", replace(clock.plain, seconds=seconds))
    assert clock.times_when_called({"ours": lambda: "ours"}, lambda: "eager") == {"ours": pytest.approx(3)}
    assert called[-2 * CALLED_ROUNDS :] == ["ours", "eager"] * CALLED_ROUNDS


def test_a_program_whose_kernels_are_too_slow_already_is_not_finished(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its whole would be checked on four kinds of inputs and timed, to lose."""
    monkeypatch.setattr(search, "HOPELESS", 0.0)
    monkeypatch.setattr(search.verify, "check", lambda *args, **more: pytest.fail("it was checked"))
    graph, known = CASES["gated mlp"]()
    found = search.Search(graph, known, CPU, 60, quick=True).run()
    assert found.program is None and found.verdict is not None and found.verdict.chosen == search.EAGER
    refused = [one.refused for one in found.verdict.trials if one.name != search.EAGER]
    assert refused and all("kernels take" in one and "eager torch takes" in one for one in refused)


def test_a_planted_wrong_rewrite_is_refused_before_anything_is_compiled(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate and the up projection swapped: another function, by a graph that would pass every look at its code."""
    graph, known = CASES["gated mlp"]()
    b = Builder()
    x, gate, up = b.input((3, 64), "float32"), b.input((64, 40), "float32"), b.input((64, 40), "float32")
    swapped = b.graph([b.add("mul", b.add("matmul", x, gate), b.add("silu", b.add("matmul", x, up)))])
    monkeypatch.setattr(search, "variants", lambda asked, back: iter([search.Variant("swapped", lowered(swapped))]))
    monkeypatch.setattr(search.Search, "_built", lambda *args: pytest.fail("it was compiled"))
    found = search.Search(graph, known, CPU, 60).run()
    assert found.program is None and found.verdict is not None and found.verdict.chosen == search.EAGER
    (refused,) = (one.refused for one in found.verdict.trials if one.name == "swapped")
    assert "another function" in refused
