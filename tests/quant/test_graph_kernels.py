"""The packed layers' kernels as candidates for kernel graphs: int8 weights in ordinary ops."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest

from anytorch import native
from anytorch.errors import WrongAnswer
from anytorch.graph import verify
from anytorch.graph.ir import Graph
from tests.graph import by_hand
from tests.graph.by_hand import int8

DOT, PANEL = "packed dot (C++)", "packed panel (C++)"
CASES: dict[str, tuple[Graph, str]] = {
    "one row": (int8(1, 256, 40, "bfloat16"), DOT),
    "groups": (int8(3, 256, 40, "bfloat16", group=64), DOT),
    "many rows": (int8(40, 96, 33, "bfloat16", bias=True), PANEL),
    "groups, many rows": (int8(40, 96, 33, "float16", group=32), PANEL),
    "scaled afterwards": (int8(5, 128, 20, "bfloat16", after=True, bias=True), PANEL),
}


def has_dot() -> bool:
    """On x86-64 the kernel needs AVX2."""
    return native.level().name != "baseline" or DOT in by_hand.names(int8(1, 256, 40, "bfloat16"), "cpp")


@pytest.mark.parametrize("name", CASES)
def test_they_pass_the_second_gate(name: str) -> None:
    graph, wanted = CASES[name]
    wanted = wanted if has_dot() else PANEL
    assert by_hand.check(graph, wanted, "cpp", kinds=("normal", "one-hot")) <= verify.TIMES_EAGER


def test_the_gate_refuses_inputs_of_16_bits_where_32_are_due() -> None:
    graph = int8(3, 256, 40, "float32")
    assert by_hand.names(graph, "cpp") >= ({DOT, PANEL} if has_dot() else {PANEL})
    if has_dot():
        with pytest.raises(WrongAnswer, match="off by"):
            by_hand.check(graph, DOT, "cpp")


def test_they_say_what_they_do_not_take() -> None:
    assert by_hand.names(int8(40, 64, 33, "bfloat16"), "cpp") == {PANEL}
    for graph in (int8(4, 64, 33, "bfloat16", group=8), int8(4, 64, 33, "float64"), by_hand.linear(4, 64, 33)):
        assert not by_hand.names(graph, "cpp") & {DOT, PANEL}


SCRIPT = """
from tests.graph import by_hand
from tests.graph.by_hand import int8

cases = [
    (int8(1, 128, 40, "float32"), "packed few rows (Triton)"),
    (int8(2, 128, 24, "float32", group=64, bias=True), "packed few rows (Triton)"),
    (int8(9, 96, 33, "float32", bias=True), "packed 16 rows (Triton)"),
    (int8(6, 64, 33, "float16", group=32), "packed 64 rows (Triton)"),
]
worst = max(by_hand.check(graph, name, "triton", kinds=("normal", "one-hot")) for graph, name in cases)
answer(worst=worst, few=[name for name in by_hand.names(int8(1, 130, 40, "float32"), "triton") if "packed" in name])
"""


def test_tritons_pass_the_second_gate(run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]) -> None:
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    found = run_script(SCRIPT, {"TRITON_INTERPRET": "1"})
    assert found["worst"] <= verify.TIMES_EAGER and found["few"] == []
