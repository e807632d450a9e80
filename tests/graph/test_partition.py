"""Which ops one kernel computes: no more tensors in it than its back end can bind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from anytorch.graph import search, verify
from anytorch.graph.backs import Back
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.loops import Kernel
from anytorch.graph.partition import MOST_BUFFERS, partition
from anytorch.graph.search import EAGER, Search

CPU = torch.device("cpu")


def _sum_of(count: int) -> Graph:
    b = Builder()
    made, *others = [b.input((4, 16), "float32") for _ in range(count)]
    for one in others:
        made = b.add("add", b.add("silu", made), one)
    return b.graph([made])


def _joined(count: int, *, beside: bool = False) -> Graph:
    """One op that reads all inputs; with `beside`, another that reads one of them."""
    b = Builder()
    inputs = [b.input((4, 16), "float32") for _ in range(count)]
    made = b.add("exp", b.add("concat", *inputs, dim=1))
    return b.graph([made, b.add("silu", inputs[0])] if beside else [made])


@pytest.mark.parametrize("most", [3, 8, MOST_BUFFERS])
def test_no_kernel_has_more_buffers_than_are_bound(most: int) -> None:
    cut = partition(_sum_of(20), {}, most_buffers=most)
    counts = [len(cut.kernel(group).buffers) for group in cut.groups]
    assert max(counts) <= most and not any(group.library for group in cut.groups)
    # A kernel reads what the one before it made, and each writes one: no more kernels than that needs.
    assert len(counts) == (1 if most == MOST_BUFFERS else -(-19 // (most - 2)))


def test_an_op_that_reads_too_many_by_itself_is_left_to_torch() -> None:
    for count, library in ((7, False), (8, True)):
        (group,) = partition(_joined(count), {}, most_buffers=8).groups
        assert group.library is library


@pytest.mark.parametrize("graph", [_sum_of(6), _joined(5, beside=True)], ids=["sum", "concat"])
def test_a_search_keeps_to_the_limit_of_its_back(few: None, monkeypatch: pytest.MonkeyPatch, graph: Graph) -> None:
    """As an adapter that binds few: it declines what has more."""
    plain = search.back_of(CPU)[0]
    assert plain is not None
    seen: list[int] = []

    def candidates(kernel: Kernel, known: Mapping[str, int], most: int | None) -> list[Schedule]:
        seen.append(len(kernel.buffers))
        if len(kernel.buffers) > 4:
            raise NotImplementedError(f"{len(kernel.buffers)} buffers are more than this device binds at once, 4")
        return plain.candidates(kernel, known, most)

    small: Back = replace(plain, candidates=candidates, most_buffers=4)
    monkeypatch.setattr(search, "back_of", lambda device: (small, ""))
    found = Search(graph, {}, CPU, 60, quick=True).run()
    assert found.verdict is not None and found.verdict.chosen != EAGER and found.program is not None
    assert seen and max(seen) <= 4
    assert verify.check(graph, {}, found.program, CPU) <= verify.TIMES_EAGER
