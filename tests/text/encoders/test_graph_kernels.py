"""The encoder's Triton kernels as candidates for kernel graphs, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

from tests.graph import by_hand
from tests.text.encoders.test_kernels import INDEX

SCRIPT = (
    INDEX
    + """
from tests.graph import by_hand
from tests.graph.by_hand import attention, norm

whole, blocks, summed = "encoder attention (Triton)", "encoder attention in blocks (Triton)", "encoder sum and norm (Triton)"
cases = [
    (attention(2, 3, 3, 40, 32), whole),
    (attention(1, 4, 2, 20, 16, causal="end", scale=0.3), whole),
    (attention(1, 2, 2, 70, 16, causal="start"), blocks),
    (attention(2, 2, 2, 9, 16, "float16"), whole),
    (norm("layer_norm", (5, 48), 2, summed=True), summed),
    (norm("layer_norm", (2, 3, 100), 1, summed=True), summed),
]
worst = max(by_hand.check(graph, name, "triton", kinds=("normal", "tiny", "one-hot")) for graph, name in cases)
refused = [
    sorted(by_hand.names(graph, "triton") & {whole, blocks, summed})
    for graph in (attention(2, 4, 2, 20, 16), attention(1, 2, 2, 20, 24), norm("layer_norm", (5, 48), 0, summed=True))
]
answer(worst=worst, refused=refused)
"""
)


def test_they_pass_the_second_gate_and_say_what_they_do_not_take(
    run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]
) -> None:
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    found = run_script(SCRIPT, {"TRITON_INTERPRET": "1"})
    assert found["worst"] <= 8 and found["refused"] == [[], [], []]


def test_they_are_for_devices_that_have_triton() -> None:
    assert not any("Triton" in name for name in by_hand.names(by_hand.attention(2, 3, 3, 40, 32), "cpp"))
