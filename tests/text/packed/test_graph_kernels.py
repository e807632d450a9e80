"""The encoder's C++ as candidates for kernel graphs: right at every shape they take, found by the search by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.graph import by_hand
from tests.graph.by_hand import CPU
from tests.graph.cases import CASES

from anytorch.graph import racing, reference, search, verify
from anytorch.graph.ir import Graph
from anytorch.graph.patterns import PREFIX
from anytorch.graph.search import Search

ATTENTION, NORM = "encoder attention (C++)", "encoder norm (C++)"


@pytest.mark.parametrize(
    ("graph", "name"),
    [
        (by_hand.attention(2, 4, 2, 70, 32), ATTENTION),
        (by_hand.attention(1, 2, 2, 33, 64, causal="end", scale=0.2), ATTENTION),
        (by_hand.attention(2, 2, 1, 1, 32, causal="start"), ATTENTION),
        (by_hand.attention(1, 1, 1, 600, 32, causal="start"), ATTENTION),  # more keys than a block
        (by_hand.norm("layer_norm", (7, 100), 2), NORM),
        (by_hand.norm("layer_norm", (3, 5, 6, 7), 1, rank=2), NORM),
        (by_hand.norm("layer_norm", (5, 8), 0), NORM),
        (by_hand.norm("rms_norm", (2, 9, 2048), 0), NORM),
        (by_hand.norm("rms_norm", (300, 33), 1), NORM),
    ],
)
def test_they_pass_the_second_gate(graph: Graph, name: str) -> None:
    assert by_hand.check(graph, name, "cpp") <= verify.TIMES_EAGER


@pytest.mark.parametrize(
    "graph",
    [
        by_hand.attention(1, 2, 2, 33, 24),  # a head that ends inside of a panel
        by_hand.attention(1, 2, 2, 33, 32, dtype="bfloat16"),
        CASES["attention with a mask"]()[0],
        CASES["attention with lengths"]()[0],
        CASES["the same in bfloat16"]()[0],
    ],
)
def test_they_say_what_they_do_not_take(graph: Graph) -> None:
    assert not by_hand.names(graph, "cpp", {"b": 2, "n": 3, "t": 50}) & {ATTENTION, NORM}


def test_they_are_no_candidates_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_CXX", "/nowhere/c++")
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", "/nowhere/at/all")
    assert not by_hand.names(by_hand.norm("rms_norm", (3, 33), 1), "cpp")


def test_they_are_raced_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    back = search.back_of(CPU)[0]
    assert back is not None
    one = replace(back, candidates=lambda kernel, known, most: back.candidates(kernel, known, 1))
    monkeypatch.setattr(search, "back_of", lambda device: (one, ""))
    monkeypatch.setattr(search, "variants", lambda graph, back, plain=search.variants: list(plain(graph, back))[:1])
    for module in (racing, search):
        monkeypatch.setattr(module, "fastest", by_hand.wins)
    monkeypatch.setattr(search, "HOPELESS", float("inf"))  # a program is built, fast or not
    graph = by_hand.attention(2, 4, 2, 70, 32)
    found = Search(graph, {}, CPU, 60).run()
    assert found.program is not None and [step.schedule for step in found.program.steps] == [f"{PREFIX}{ATTENTION}"]
    inputs = verify.example(graph, {}, "normal", CPU, seed=3)
    torch.testing.assert_close(found.program(inputs)[0], reference.evaluate(graph, inputs)[0], rtol=1e-4, atol=1e-5)
