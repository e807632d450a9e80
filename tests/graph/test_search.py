"""The search's use of its time: what is compiled before the clock is looked at again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from anytorch.graph import search
from anytorch.graph.emit.schedule import Schedule
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
