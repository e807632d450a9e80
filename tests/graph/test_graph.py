"""Graphs: sizes, shapes by rule, JSON, lowering, and the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from anytorch.errors import GraphError
from anytorch.graph import reference, verify
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.lower import lowered
from anytorch.graph.program import all_by_torch
from anytorch.graph.sizes import Size, read_size
from tests.graph.cases import CASES

CPU = torch.device("cpu")


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def test_sizes_are_polynomials() -> None:
    b, n = Size.named("b"), Size.named("n")
    assert 4 * b + 1 - 1 == b * 4 and (4 * b * n) // (2 * n) == 2 * b and b - b == 0
    assert (4 * b + 2).at({"b": 3}) == 14  # type: ignore[union-attr]
    assert read_size(str(3 * b * n + 2 * b + 7)) == 3 * b * n + 2 * b + 7
    with pytest.raises(ValueError, match="not always a multiple"):
        (4 * b + 2) // 4
    with pytest.raises(ValueError, match="not a name"):
        read_size("__import__('os')")


@pytest.mark.parametrize("name", CASES)
def test_a_graph_survives_json_and_lowering(name: str) -> None:
    graph, known = CASES[name]()
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph and again.key == graph.key
    inputs = verify.example(graph, known, "normal", CPU)
    if "int64" in {graph.nodes[n].dtype for n in graph.inputs}:
        inputs[-1] = torch.tensor([40, 5])
    plain, parts = reference.evaluate(graph, inputs), reference.evaluate(lowered(graph), inputs)
    truths = reference.evaluate(graph, inputs, exact=True)
    for one, other, truth in zip(plain, parts, truths, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        bound = 4 * verify.errors(one, truth) + verify.rounding(one, truth)
        assert verify.errors(other, truth) <= bound


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_torchs_ops_is_the_reference(name: str) -> None:
    """What graphs are called by that were not searched, or where eager torch won: for any sizes, and with gradients."""
    graph, known = CASES[name]()
    inputs = verify.example(graph, known, "normal", CPU)
    lying = [one.transpose(0, -1).contiguous().transpose(0, -1) if one.dim() > 1 else one for one in inputs]
    program = all_by_torch(graph)
    for tensors in (inputs, lying):
        for made, wanted in zip(program(tensors), reference.evaluate(graph, tensors), strict=True):
            assert made.dtype == wanted.dtype and torch.equal(made, wanted)
    halves = [one for one in inputs if one.is_floating_point()]
    [one.requires_grad_() for one in halves]
    made = [one for one in program(inputs) if one.is_floating_point()]
    grads = torch.autograd.grad([one.float().square().sum() for one in made], halves, allow_unused=True)
    plain = [one for one in reference.evaluate(graph, inputs) if one.is_floating_point()]
    wanted_grads = torch.autograd.grad([one.float().square().sum() for one in plain], halves, allow_unused=True)
    torch.testing.assert_close(grads, wanted_grads)


def test_equal_expressions_are_one_node() -> None:
    b = Builder()
    x = b.input((4,), "float32")
    assert b.add("exp", x) == b.add("exp", x)
    assert b.constant(1, "int64") != b.constant(1.0, "float32")
    assert b.input((4,), "float32") != x


@pytest.mark.parametrize(
    ("op", "shapes", "attrs", "said"),
    [
        ("matmul", [(4, 8), (4, 8)], {}, r"matmul of \[4, 8\] and \[4, 8\] is invalid: the last size of the first, 8"),
        ("add", [(4, 8), (4, 9)], {}, r"add of \[4, 8\] and \[4, 9\] is invalid: sizes 8 and 9 in dimension -1 differ"),
        ("reshape", [(4, 8)], {"shape": (5, 6)}, "32 elements are not 30"),
        ("reduce", [(4, 8)], {"how": "sum", "dims": (2,)}, "dim=2 is invalid for a tensor of 2 dimensions"),
        ("reduce", [(4, 8)], {"how": "median", "dims": (0,)}, "unknown kind 'median'; known: sum"),
        ("rms_norm", [(4, 8), (4,)], {"rank": 1, "eps": 0.0}, r"a weight or bias of \[4\] is not of the normalized"),
        ("concat", [(4, 8), (5, 9)], {"dim": 0}, "other sizes differ"),
        ("slice", [(4, 8)], {"dim": 1, "start": 5, "stop": 9}, "is outside"),
        ("attention", [(1, 3, 2, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {}, "3 query heads cannot share 2 key heads"),
        ("softmax", [(4, 8)], {"dim": 0, "axis": 1}, "softmax takes no axis"),
        ("expand", [(4, 8)], {"shape": (4, 16)}, "only sizes of 1 are repeated"),
        ("nonsense", [(4,)], {}, "unknown op 'nonsense'"),
    ],
)
def test_a_wrong_shape_names_the_op_the_shapes_and_the_rule(
    op: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], said: str
) -> None:
    b = Builder()
    numbers = [b.input(shape, "float32") for shape in shapes]
    with pytest.raises(GraphError, match=said):
        b.add(op, *numbers, **attrs)


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"format": 99, "nodes": [], "outputs": []},
        {"format": 1, "nodes": [{"op": "exp", "args": [0], "attrs": {}}], "outputs": [0]},
        {
            "format": 1,
            "nodes": [{"op": "input", "args": [], "attrs": {"shape": ["x"], "dtype": "float32"}}],
            "outputs": [3],
        },
        {
            "format": 1,
            "nodes": [{"op": "input", "args": [], "attrs": {"shape": [-4], "dtype": "float32"}}],
            "outputs": [0],
        },
        {"format": 1, "nodes": [None], "outputs": [0]},
        {"format": 1, "nodes": [{"op": "input", "args": [], "attrs": {"shape": nested(300)}}], "outputs": [0]},
    ],
)
def test_a_damaged_file_is_refused(body: Any) -> None:
    with pytest.raises(GraphError):
        Graph.from_json(body)


def test_inputs_that_disagree_about_a_size_are_named() -> None:
    b = Builder()
    graph = b.graph([b.add("add", b.input(("n",), "float32"), b.input(("n",), "float32"))])
    with pytest.raises(GraphError, match=r"input 1 has shape .5.: size n is 5 here and 4"):
        reference.evaluate(graph, [torch.ones(4), torch.ones(5)])


def test_sizes_follow_from_sums_and_products() -> None:
    b, n = Size.named("b"), Size.named("n")
    size = 4 * b + 2
    assert isinstance(size, Size) and size.solved(14, {}) == {"b": 3} and size.solved(13, {}) == {}
    both = b * n
    assert isinstance(both, Size) and both.solved(12, {}) == {} and both.solved(12, {"b": 4}) == {"n": 3}
    assert both.solved(12, {"b": 4, "n": 3}) == {} and both.renamed({"b": "x", "n": "b"}) == b * Size.named("x")
    builder = Builder()
    builder.add("exp", builder.input((b * n, 2 * b), "float32"))
    graph = builder.graph([1])
    assert reference.sizes_of(graph, [torch.ones(15, 6)]) == {"b": 3, "n": 5}
    with pytest.raises(GraphError, match="do not follow from the inputs"):
        reference.sizes_of(graph, [torch.ones(15, 5)])
