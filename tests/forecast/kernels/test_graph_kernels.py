"""Kronos's linear layer as a candidate for kernel graphs, in Triton's interpreter, and in a whole search."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest

SCRIPT = """
import torch
from dataclasses import replace
from anytorch.graph import backs, racing, search
from anytorch.graph.search import Search
from tests.graph import by_hand
from tests.graph.by_hand import CPU, linear

name = "Kronos linear (Triton)"
cases = [
    linear(1, 64, 40),
    linear(3, 64, 40, normed=True, bias=True),
    linear(20, 48, 33, bias=True, residual=True),
    linear(5, 64, 48, residual=True),
    linear(4, 64, 48, normed=True, gated=True),
]
worst = max(by_hand.check(graph, name, "triton", kinds=("normal", "one-hot")) for graph in cases)
others = (linear(4, 64, 40, turned=False), linear(65, 64, 40), linear(4, 64, 40, dtype="float16"), linear(4, 8, 40))
refused = [sorted(by_hand.names(graph, "triton") & {name}) for graph in others]

# A whole search, as on a device with Triton: the kernel is raced, wins because the test says so, and is recalled.
triton = backs._triton(CPU)[0]
one = replace(triton, candidates=lambda kernel, known, most: triton.candidates(kernel, known, 1))
search.back_of = lambda device: (one, "")
search.variants = lambda graph, back, plain=search.variants: list(plain(graph, back))[:1]
racing.fastest = search.fastest = by_hand.wins
search.HOPELESS = float("inf")  # a program is built, fast or not
graph = linear(3, 64, 40, normed=True, bias=True)
found, again = Search(graph, {}, CPU, 60).run(), Search(graph, {}, CPU, 60).run()
steps = [[step.schedule for step in one.program.steps] for one in (found, again)]
answer(worst=worst, refused=refused, steps=steps, remembered=again.verdict.remembered)
"""


@pytest.mark.long
def test_it_passes_the_second_gate_and_is_found_by_a_search(
    run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]
) -> None:
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    found = run_script(SCRIPT, {"TRITON_INTERPRET": "1"})
    assert found["worst"] <= 8 and found["refused"] == [[], [], [], []]
    assert found["steps"] == [["handwritten: Kronos linear (Triton)"]] * 2 and found["remembered"]
