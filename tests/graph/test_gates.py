"""The gates: rewrites that are right pass, planted wrong ones do not; the same for compiled kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
import torch

from anytorch.errors import WrongAnswer
from anytorch.graph import field, reference, shrink, verify
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.lower import lowered
from anytorch.graph.rewrite import (
    column_scales_after_matmul,
    rewritten,
    scale_after_matmul,
    split_products,
    split_softmax,
)
from anytorch.graph.shrink import shrunk
from tests.graph.cases import CASES

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_lowering_and_rewriting_keep_the_function(name: str) -> None:
    graph, _ = CASES[name]()
    field.check_same(graph, lowered(graph))
    field.check_same(graph, rewritten(lowered(graph)))


def _rms(change: str = "") -> Graph:
    b = Builder()
    x, w = b.input((4, 12), "float32"), b.input((12, 8), "float32")
    squares = b.add(
        "reduce", b.add("square", x), how="sum" if change == "dropped mean" else "mean", dims=(1,), keepdim=True
    )
    scale = b.add("rsqrt", b.add("add", squares, b.constant(1e-3 if change == "eps" else 1e-6, "float32")))
    if change == "after":
        return b.graph([b.add("mul", b.add("matmul", x, w), scale)])
    if change == "squared":
        scale = b.add("mul", scale, scale)
    return b.graph([b.add("matmul", b.add("mul", x, scale), w)])


def _softmax(change: str = "") -> Graph:
    b = Builder()
    x, v = b.input((4, 12), "float32"), b.input((12, 8), "float32")
    top = b.add("reduce", x, how="max", dims=(1,), keepdim=True)
    e = b.add("exp", x if change == "no shift" else b.add("sub", x, top))
    whole = b.add("exp", x) if change == "wrong denominator" else e
    total = b.add("reduce", whole, how="sum", dims=(1,), keepdim=True)
    if change in ("late", "wrong denominator"):
        return b.graph([b.add("div", b.add("matmul", e, v), total)])
    return b.graph([b.add("matmul", b.add("div", e, total), v)])


def _gated(swapped: bool) -> Graph:
    b = Builder()
    x, gate, up = b.input((4, 12), "float32"), b.input((12, 8), "float32"), b.input((12, 8), "float32")
    one, other = (up, gate) if swapped else (gate, up)
    return b.graph([b.add("mul", b.add("silu", b.add("matmul", x, one)), b.add("matmul", x, other))])


@pytest.mark.parametrize(
    ("right", "other"),
    [
        (_rms, lambda: _rms("after")),
        (_softmax, lambda: _softmax("no shift")),
        (_softmax, lambda: _softmax("late")),
    ],
)
def test_the_first_gate_accepts_what_is_equal(right: Callable[[], Graph], other: Callable[[], Graph]) -> None:
    field.check_same(right(), other())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (_rms, lambda: _rms("dropped mean")),
        (_rms, lambda: _rms("eps")),
        (_rms, lambda: _rms("squared")),
        (_softmax, lambda: _softmax("wrong denominator")),
        (lambda: _gated(False), lambda: _gated(True)),
    ],
)
def test_the_first_gate_refuses_planted_mistakes(right: Callable[[], Graph], wrong: Callable[[], Graph]) -> None:
    with pytest.raises(WrongAnswer, match="another function"):
        field.check_same(right(), wrong())


def test_relu_is_not_the_identity_and_a_maximum_is_associative() -> None:
    def graph(kind: str) -> Graph:
        b = Builder()
        x = b.input((6, 8), "float32")
        if kind == "relu":
            return b.graph([b.add("relu", x)])
        if kind == "x":
            return b.graph([b.add("mul", x, b.constant(1.0, "float32"))])
        if kind == "at once":
            return b.graph([b.add("reduce", x, how="max", dims=(1,))])
        halves = [b.add("slice", x, dim=1, start=s, stop=s + 4) for s in (0, 4)]
        return b.graph([b.add("maximum", *(b.add("reduce", half, how="max", dims=(1,)) for half in halves))])

    with pytest.raises(WrongAnswer):
        field.check_same(graph("relu"), graph("x"))
    field.check_same(graph("at once"), graph("in halves"))


def test_splits_keep_the_function_and_the_numbers() -> None:
    b = Builder()
    q, k = b.input((2, 4, 1, 16), "float32"), b.input((2, 2, 64, 16), "float32")
    graph = b.graph([b.add("attention", q, k, b.input((2, 2, 64, 16), "float32"))])
    better = rewritten(lowered(graph), scale_after_matmul, split_softmax(4))
    assert any(node.op == "store" for _, node in better)
    field.check_same(graph, better)
    inputs = verify.example(graph, {}, "normal", CPU)
    (plain,), (split,) = reference.evaluate(graph, inputs), reference.evaluate(better, inputs)
    torch.testing.assert_close(plain, split)
    product, _ = CASES["rms norm and product"]()
    wide = rewritten(lowered(product), split_products(1))
    assert wide.key != lowered(product).key
    field.check_same(product, wide)


def test_small_versions_keep_what_reshapes_need() -> None:
    b = Builder()
    x, w = b.input((8, 4096), "float32"), b.input((4096, 4096), "float32")
    heads = b.add("reshape", b.add("matmul", x, w), shape=(8, 32, 128))
    (small,) = shrunk(b.graph([b.add("softmax", heads, dim=-1)]))
    assert max(size for _, node in small for size in node.shape if isinstance(size, int)) < 512


def test_sizes_that_are_products_in_several_ways_are_made_smaller_too() -> None:
    """1024 rows are 8 x 128 of a batch, and not 32 x 32: judged at their real sizes, models took seconds of this gate."""
    b = Builder()
    x, w, bias = b.input((8, 128, 384), "float32"), b.input((384, 1152), "float32"), b.input((1152,), "float32")
    made = b.add("add", b.add("matmul", b.add("reshape", x, shape=(1024, 384)), w), bias)
    parts = b.add("reshape", made, shape=(8, 128, 3, 12, 32))
    heads = b.add("permute", b.add("slice", parts, dim=2, start=1, stop=2), dims=(2, 0, 3, 1, 4))
    graph = b.graph([b.add("softmax", b.add("reshape", heads, shape=(8, 12, 128, 32)), dim=-1)])
    (small,) = shrunk(graph)
    assert max(math.prod(map(int, node.shape)) for _, node in small) < 64_000 < 1024 * 384
    assert [node.op for _, node in small] == [node.op for _, node in graph]


def test_many_sizes_that_fit_no_reshape_are_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen powers of two can be made of one another in more ways than anybody can wait for."""
    b = Builder()
    made = [b.add("exp", b.input((2**power, 2), "float32")) for power in range(5, 17)]
    odd = b.input((9 * 2**17, 30), "float32")
    graph = b.graph([*made, b.add("reshape", odd, shape=(6 * 2**17, 45))])
    steps, plain = itertools.count(), shrink._ways

    def counted(size: int, mapping: Mapping[int, int]) -> Iterable[int]:
        assert next(steps) < 20_000
        return plain(size, mapping)

    monkeypatch.setattr(shrink, "_ways", counted)
    (small,) = shrunk(graph)
    assert small.nodes[small.inputs[0]].shape[0] < 32


def test_errors_are_found_where_the_truth_is_a_number_and_change_nothing() -> None:
    inf, nan = math.inf, math.nan
    truth = torch.tensor([1.0, inf, nan, -2.0], dtype=torch.float64)
    found = torch.tensor([1.5, nan, 7.0, -2.0], dtype=torch.float64)
    kept = found.clone(), truth.clone()
    assert verify.errors(found, truth) == 0.5 and verify.rounding(found.float(), truth) == 16 * 2.0**-23 * 2
    assert verify.errors(torch.tensor([nan, inf, nan, -2.0]), truth) == inf
    assert verify.errors(torch.tensor([inf, inf, nan, -2.0]), truth) == inf
    assert verify.errors(torch.ones(2), torch.tensor([nan, inf], dtype=torch.float64)) == 0.0
    assert verify.errors(torch.ones(0), torch.ones(0, dtype=torch.float64)) == 0.0
    torch.testing.assert_close((found, truth), kept, rtol=0, atol=0, equal_nan=True)
    row = torch.ones(1, dtype=torch.float64).expand(3)
    assert verify.errors(row, torch.zeros(3, dtype=torch.float64)) == 1.0


def test_a_size_that_an_op_wants_as_it_is_stays() -> None:
    b = Builder()
    x = b.input((50, 100), "float32")
    odd = b.add("slice", b.add("reshape", x, shape=(5000,)), dim=0, start=1, stop=4998)
    graph = b.graph([b.add("exp", odd), b.add("softmax", b.input((333, 7), "float32"), dim=0)])
    (small,) = shrunk(graph)
    shapes = [node.shape for _, node in small]
    assert (4997,) in shapes and (50, 100) in shapes and (333, 7) not in shapes


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_of_the_second_argument_leave_the_product(turned: bool, dtype: str) -> None:
    """One factor per column comes after the product, one per row goes to the first argument: w is read as it lies."""
    b = Builder()
    x, w = b.input((2, 3, 4, 16), dtype), b.input((2, 3, 8, 16) if turned else (2, 3, 16, 8), dtype)
    each, every = b.input((2, 3, 8, 1) if turned else (2, 3, 1, 8), dtype), b.input((16,) if turned else (16, 1), dtype)
    scaled = b.add("mul", b.add("mul", w, each), every)
    shown = b.add("permute", scaled, dims=(0, 1, 3, 2)) if turned else scaled
    graph = b.graph([b.add("matmul", x, shown)])
    found = rewritten(graph, column_scales_after_matmul)
    field.check_same(graph, found)
    (product,) = (node for _, node in found if node.op == "matmul")
    read = product.args[1]
    while found.nodes[read].op != "input":
        assert found.nodes[read].kind == "view"
        (read,) = found.nodes[read].args
    assert read == 1
    inputs = verify.example(graph, {}, "normal", CPU)
    (plain,), (moved,) = reference.evaluate(graph, inputs, exact=True), reference.evaluate(found, inputs, exact=True)
    torch.testing.assert_close(moved, plain)


def test_a_rewrite_that_does_not_fit_is_left_out() -> None:
    """Scales of keys by head, without the batch: their leading sizes are not those that the view of the keys has."""
    b = Builder()
    q, k, s = b.input((2, 4, 3, 16), "float32"), b.input((2, 4, 5, 16), "float32"), b.input((4, 1, 16), "float32")
    keys = b.add("reshape", b.add("mul", k, s), shape=(8, 5, 16))
    rows = b.add("reshape", q, shape=(8, 3, 16))
    graph = b.graph([b.add("matmul", rows, b.add("permute", keys, dims=(0, 2, 1)))])
    field.check_same(graph, rewritten(graph))


def test_what_hangs_on_the_last_digit_of_its_inputs_is_judged_by_that() -> None:
    """The softmax of large numbers is one row or another, whoever computes it; on other inputs nothing is forgiven."""
    b = Builder()
    q, k, v = (b.input((1, 2, 4, 64), "bfloat16") for _ in range(3))
    graph = b.graph([b.add("attention", q, k, v, causal=False)])

    def rounded_scores(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        q, k, v = tensors
        return [(q @ k.transpose(-1, -2) / 8).softmax(-1) @ v]

    verify.check(graph, {}, rounded_scores, CPU)

    def off(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [made * 1.25 for made in rounded_scores(tensors)]

    with pytest.raises(WrongAnswer, match="normal inputs"):
        verify.check(graph, {}, off, CPU)


def _wrong(graph: Graph, kind: str) -> verify.Run:
    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        (answer,) = reference.evaluate(graph, inputs)
        if kind == "a missing element":
            answer[-1, -1] = math.nan
        elif kind == "a wrong element":
            answer[1, 2] += 0.01 * answer.abs().max()
        elif kind == "half precision inside":
            answer = reference.evaluate(graph, [one.bfloat16().float() for one in inputs])[0]
        elif kind == "a changed input":
            inputs[0].mul_(2)
        elif kind == "another dtype":
            answer = answer.double()
        return [answer]

    return run  # type: ignore[return-value]


@pytest.mark.parametrize(
    "kind", ["a missing element", "a wrong element", "half precision inside", "a changed input", "another dtype"]
)
def test_the_second_gate_refuses_planted_mistakes(kind: str) -> None:
    graph, known = CASES["gated mlp"]()
    verify.check(graph, known, lambda inputs: reference.evaluate(graph, inputs), CPU)
    with pytest.raises(WrongAnswer):
        verify.check(graph, known, _wrong(graph, kind), CPU)


@pytest.mark.parametrize("lead", [(1, 1), (5, 3)])
def test_a_rows_scale_leaves_a_product_through_a_reshape_that_keeps_rows(lead: tuple[int, ...]) -> None:
    """Linear layers flatten what comes before the last dimension."""
    b = Builder()
    x, weight, w = b.input((*lead, 12), "float32"), b.input((12,), "float32"), b.input((12, 7), "float32")
    normed = b.add("rms_norm", x, weight, rank=1, eps=1e-6)
    graph = lowered(b.graph([b.add("matmul", b.add("reshape", normed, shape=(math.prod(lead), 12)), w)]))
    better = rewritten(graph, scale_after_matmul)
    assert [g.nodes[g.outputs[0]].op for g in (graph, better)] == ["matmul", "mul"]
    field.check_same(*shrunk(graph, better))


def test_a_reshape_that_changes_rows_keeps_its_scale() -> None:
    b = Builder()
    x, w = b.input((2, 12), "float32"), b.input((6, 7), "float32")
    scale = b.add("reduce", x, how="sum", dims=(1,), keepdim=True)
    graph = b.graph([b.add("matmul", b.add("reshape", b.add("mul", x, scale), shape=(4, 6)), w)])
    assert rewritten(graph, scale_after_matmul) == graph
