"""The device's own kernels as candidates for kernel graphs, and in a whole search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.graph import by_hand
from tests.webgpu.agree import adapter_manner  # noqa: F401  (the fixture `manner`)

from anytorch.graph import racing, reference, search, verify
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.search import Search

pytestmark = pytest.mark.usefixtures("webgpu")
PRODUCT, SOFTMAX, NORM = "product with bias and activation (WGSL)", "softmax (WGSL)", "norm (WGSL)"
BYTES = "int8 product (WGSL)"


def device() -> torch.device:
    return torch.device("webgpu")


def softmax(*shape: int, dim: int = -1) -> Graph:
    b = Builder()
    return b.graph([b.add("softmax", b.input(shape, "float32"), dim=dim)])


CASES: dict[str, tuple[Graph, str]] = {
    "linear, turned": (by_hand.linear(5, 64, 40, bias=True, act="relu"), PRODUCT),
    "linear": (by_hand.linear(3, 33, 17, bias=True, turned=False), PRODUCT),
    "linear without a bias": (by_hand.linear(5, 48, 36, act="gelu_tanh"), PRODUCT),
    "bytes": (by_hand.int8(3, 64, 40, "float32"), BYTES),
    "bytes, scaled afterwards": (by_hand.int8(1, 36, 8, "float32", after=True), BYTES),
    "softmax": (softmax(7, 100), SOFTMAX),
    "softmax of columns": (softmax(6, 5, 33, dim=1), SOFTMAX),
    "layer norm": (by_hand.norm("layer_norm", (7, 100), 2), NORM),
    "layer norm of two": (by_hand.norm("layer_norm", (3, 5, 6, 7), 1, rank=2), NORM),
    "rms norm": (by_hand.norm("rms_norm", (9, 64), 1), NORM),
    "rms norm without a weight": (by_hand.norm("rms_norm", (300, 33), 0), NORM),
}


@pytest.mark.native
@pytest.mark.parametrize("name", CASES)
def test_they_pass_the_second_gate(name: str, manner: str, fresh_plans: None) -> None:
    graph, wanted = CASES[name]
    assert by_hand.check(graph, wanted, "wgsl", device=device()) <= verify.TIMES_EAGER


def test_they_say_what_they_do_not_take() -> None:
    others = (by_hand.linear(5, 64, 40), by_hand.linear(5, 64, 40, act="silu"), softmax(0, 8))
    assert [by_hand.names(graph, "wgsl", device=device()) for graph in others] == [set()] * 3
    assert not by_hand.names(softmax(7, 8), "wgsl")  # a tensor of another device


def test_bytes_are_read_by_the_devices_kernel_alone() -> None:
    found = Search(by_hand.int8(3, 64, 40, "float32"), {}, device(), 30, quick=True).run()
    assert found.verdict is not None
    refused = {one.name: one.refused for one in found.verdict.trials}
    assert "int8 is not computed in WGSL" in refused["all fused, scales after products"]
    tried = [name for name in refused if "handwritten" in name]
    assert all("int8" in name for name in tried) and any(one.trial(BYTES) for one in found.kernels)


def test_a_search_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = search.back_of

    def fewer(where: torch.device) -> Any:
        back, why = plain(where)
        assert back is not None, why
        return replace(back, candidates=lambda kernel, known, most: back.candidates(kernel, known, 1)), ""

    monkeypatch.setattr(search, "back_of", fewer)
    monkeypatch.setattr(search, "variants", lambda graph, back, plain=search.variants: list(plain(graph, back))[:1])
    for module in (racing, search):
        monkeypatch.setattr(module, "fastest", by_hand.wins)
    monkeypatch.setattr(search, "HOPELESS", float("inf"))  # a program is built, fast or not
    graph = by_hand.linear(5, 64, 40, bias=True, act="relu", residual=True)
    found = Search(graph, {}, device(), 60).run()
    again = Search(graph, {}, device(), 60).run()
    assert found.program is not None and again.program is not None and again.verdict is not None
    assert again.verdict.remembered
    assert again.program.steps[0].schedule == f"handwritten: {PRODUCT}"
    inputs = verify.example(graph, {}, "normal", device(), seed=3)
    (wanted,) = reference.evaluate(graph, inputs, exact=True)
    torch.testing.assert_close(again.program(inputs)[0].cpu().double(), wanted, rtol=1e-4, atol=1e-4)
