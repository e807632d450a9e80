"""Kernel graphs on the webgpu device: every case against float64, in both manners of adapter; NaN and infinities."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.graph.cases import CASES
from tests.webgpu.agree import adapter_manner  # noqa: F401  (the fixture `manner`)

from anytorch.graph import new_kernel_graph, verify
from anytorch.graph.backs import back_of
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.lower import lowered
from anytorch.graph.partition import MOST_BUFFERS, partition
from anytorch.graph.program import Program, Step
from anytorch.graph.rewrite import rewritten
from anytorch.webgpu import graphs

pytestmark = pytest.mark.usefixtures("webgpu")


def device() -> torch.device:
    return torch.device("webgpu")  # a name that torch knows once it is registered


def program_of(graph: Graph, known: dict[str, int], choice: int = 0) -> Program:
    """The graph by our kernels alone, each with a schedule that its adapter is offered: the first, another, the last."""
    back, why = back_of(device())
    assert back is not None, why
    cut = partition(rewritten(lowered(graph)), known, most_buffers=back.most_buffers)
    steps = []
    for group in cut.groups:
        assert not group.library
        kernel = cut.kernel(group)
        offered = back.candidates(kernel, known)
        schedule = offered[min(choice, len(offered) - 1)]
        steps.append(Step(group, kernel, back.prepare(kernel, schedule), schedule.name))
    return Program(cut, steps)


def test_a_device_says_how_many_buffers_a_kernel_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for binds, most in ((8, 8), (1_000_000, MOST_BUFFERS)):
        monkeypatch.setattr(graphs, "open_runtime", lambda: SimpleNamespace(features=(), limits={graphs.BINDS: binds}))  # noqa: B023
        assert graphs.back().most_buffers == most


EVERY_WAY = ("rms norm and product", "attention with order", "softmax")


@pytest.mark.native
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right(name: str, manner: str) -> None:
    graph, known = CASES[name]()
    tried = set()
    choices = range(5) if name in EVERY_WAY else (1,)  # a strip of rows takes Mesa seconds to compile
    for choice in choices if manner == "hardware" else (0,):
        program = program_of(graph, known, choice)
        names = tuple(step.schedule for step in program.steps)
        if names in tried:
            break
        kinds = ("normal", "one-hot") if not tried and "lengths" not in name else ("normal",)
        tried.add(names)
        assert verify.check(graph, known, partial(program, poison=True), device(), kinds) <= verify.TIMES_EAGER


def _of_rows(function: str, dtype: str, *shape: int) -> Graph:
    b = Builder()
    x = b.input(shape, dtype)
    if function == "softmax":
        return b.graph([b.add("softmax", x, dim=-1)])
    if function == "softmax of columns":
        return b.graph([b.add("softmax", x, dim=0)])
    how, dims = function.split()
    return b.graph([b.add("reduce", x, how=how, dims=tuple(map(int, dims.split(","))))])


ROWS: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "long rows": ("sum 1", "float32", (3, 3000)),
    "everything": ("mean 0,1", "float32", (40, 33)),
    "two dimensions": ("max 1,2", "float32", (5, 6, 7)),
    "columns": ("sum 0", "float32", (300, 9)),
    "softmax of columns": ("softmax of columns", "float32", (70, 9)),
    "whole numbers": ("sum 1", "int32", (4, 70)),
    "counted bools": ("sum 0", "bool", (9, 5)),
    "the least of whole numbers": ("min 1", "int32", (4, 70)),
    "narrow rows": ("softmax", "bfloat16", (5, 70)),
    "narrow rows that begin within a word": ("softmax", "bfloat16", (5, 33)),
}


@pytest.mark.native
@pytest.mark.parametrize("name", ROWS)
def test_rows_and_columns_are_right(name: str, manner: str) -> None:
    function, dtype, shape = ROWS[name]
    graph = _of_rows(function, dtype, *shape)
    run = partial(program_of(graph, {}), poison=True)
    assert verify.check(graph, {}, run, device(), ("normal",)) <= verify.TIMES_EAGER


def _concat_of_sums() -> Graph:
    """What is not chosen must not be read: rows of x are summed, and stand before rows of y."""
    b = Builder()
    x, y = b.input((5, 90), "float32"), b.input((3, 4), "float32")
    sums = b.add("expand", b.add("reduce", x, how="sum", dims=(1,), keepdim=True), shape=(5, 4))
    both = b.add("concat", b.add("softmax", sums, dim=-1), y, dim=0)
    return b.graph([b.add("exp", both), b.add("reduce", both, how="max", dims=(0,))])


def _norm_of_planes() -> Graph:
    b = Builder()
    x = b.input((3, 6, 7), "float32")
    weight, bias = b.input((6, 7), "float32"), b.input((6, 7), "float32")
    return b.graph([b.add("layer_norm", x, weight, bias, rank=2, eps=1e-5)])


def _wide_heads() -> Graph:
    b = Builder()
    q, k = b.input((1, 2, 3, 80), "float32"), b.input((1, 1, 70, 80), "float32")
    return b.graph([b.add("attention", q, k, b.input((1, 1, 70, 80), "float32"), causal="end")])


def _wide_product() -> Graph:
    b = Builder()
    x, w, bias = b.input((3, 130), "float32"), b.input((130, 100), "float32"), b.input((100,), "float32")
    return b.graph([b.add("tanh", b.add("add", b.add("matmul", x, w), bias))])


def _empty_part() -> Graph:
    b = Builder()
    x, y = b.input((0, 4), "float32"), b.input((3, 4), "float32")
    both = b.add("concat", x, y, dim=0)
    return b.graph([b.add("neg", both), b.add("exp", x)])


SHAPES = {
    "a concat of sums": _concat_of_sums,
    "norms of planes": _norm_of_planes,
    "heads wider than the lanes": _wide_heads,
    "columns in two blocks": _wide_product,
    "an empty part": _empty_part,
}


@pytest.mark.native
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_right(name: str, manner: str) -> None:
    graph = lowered(SHAPES[name]())  # eager torch computes it by parts too, whose kernels compile fast
    run = partial(program_of(graph, {}), poison=True)
    assert verify.check(graph, {}, run, device(), ("normal",)) <= verify.TIMES_EAGER


SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -2.0, 1e-40]


@pytest.mark.native
@pytest.mark.parametrize(
    "op", ["relu", "exp", "log", "rsqrt", "reciprocal", "tanh", "sigmoid", "not", "maximum", "div", "le", "eq", "ne"]
)
def test_numbers_that_are_none_are_torchs(op: str) -> None:
    b = Builder()
    x, y = b.input((8, 8), "float32"), b.input((8, 8), "float32")
    graph = b.graph([b.add(op, x, y) if op in ("maximum", "div", "le", "eq", "ne") else b.add(op, x)])
    value = torch.tensor(SPECIAL).expand(8, 8).contiguous()
    given = [value, value.T.contiguous()]
    run = program_of(graph, {})
    (found,) = run([one.to(device()) for one in given])
    wanted = {"not": torch.logical_not, "relu": torch.relu}.get(op) or getattr(torch, op)
    both = op in ("maximum", "div", "le", "eq", "ne")
    torch.testing.assert_close(
        found.cpu(), wanted(*(given if both else given[:1])), rtol=1e-5, atol=1e-6, equal_nan=True
    )


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_compared_as_they_are_rounded(dtype: str) -> None:
    """Of tiny inputs 0.5 + x is 0.5 in half precision: eager says that it is not above 0.5, and so do we."""
    b = Builder()
    x = b.input((9, 41), dtype)
    shifted = b.add("sub", b.add("sigmoid", b.add("mul", x, b.constant(2.0, dtype))), b.constant(0.5, dtype))
    graph = b.graph([b.add("mul", shifted, x), b.add("gt", shifted, b.constant(0.0, dtype))])
    assert verify.check(graph, {}, partial(program_of(graph, {}), poison=True), device()) <= verify.TIMES_EAGER


@pytest.mark.native
def test_rows_with_numbers_that_are_none(manner: str) -> None:
    graph = _of_rows("softmax", "float32", 4, 70)
    x = torch.randn(4, 70)
    x[0, 3], x[1, 60], x[2] = float("nan"), float("inf"), -float("inf")
    x[3, 5] = -float("inf")
    (found,) = program_of(graph, {})([x.to(device())])
    torch.testing.assert_close(found.cpu(), x.softmax(-1), rtol=1e-5, atol=1e-6, equal_nan=True)
    graph = _of_rows("max 1", "float32", 4, 70)
    (largest,) = program_of(graph, {})([x.to(device())])
    torch.testing.assert_close(largest.cpu(), x.amax(1), equal_nan=True)


def test_operands_may_begin_within_their_buffers() -> None:
    b = Builder()
    x, y = b.input((4, 5), "float32"), b.input((4, 5), "bfloat16")
    run = program_of(b.graph([b.add("mul", b.add("exp", x), y)]), {})
    wide, narrow = torch.randn(6, 5), torch.randn(7, 5).bfloat16()
    (found,) = run([wide.to(device())[2:], narrow.to(device())[3:]])
    torch.testing.assert_close(found.cpu(), wide[2:].exp() * narrow[3:])


@pytest.mark.long
def test_a_graph_for_webgpu_is_searched_and_called(ours: None) -> None:
    g = new_kernel_graph(backend="webgpu")
    x, w = g.new_input(("b", 32), dtype="float32"), g.new_input((32, 24), dtype="float32")
    g.mark_output(g.silu(g.rms_norm(x) @ w))
    torch.manual_seed(0)
    tensors = [torch.randn(4, 32), torch.randn(32, 24)]
    on_device: list[Any] = [tensor.to(device()) for tensor in tensors]
    (plain,) = g(*on_device)
    g.superoptimize(sizes={"b": 4}, time_limit_s=3)
    (fast,) = g(*on_device)
    wanted = torch.nn.functional.silu(torch.nn.functional.rms_norm(tensors[0], (32,), eps=1e-6) @ tensors[1])
    for found in (plain, fast):
        assert found.device.type == "webgpu"
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-5)
    said = g.explain()
    assert "in one kernel" in said and "lanes=" in said


def test_a_round_of_launches_is_recorded_to_be_timed() -> None:
    """A software adapter is timed launch by launch; what a GPU does is tried here on one."""
    from anytorch.graph.clock import LAUNCHES, Clock

    clock = Clock(device())
    assert not clock._tapes
    clock._tapes = True
    sets = clock.copies([torch.ones(8, device=device())])
    assert len(sets) > 1
    total = torch.zeros(8, device=device())
    run = clock.timed([lambda one=one: total.add_(one[0]) for one in sets])  # type: ignore[misc]
    before = float(total.cpu()[0])
    run()
    assert float(total.cpu()[0]) == before + LAUNCHES
