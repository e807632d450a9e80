"""How many functions an op calls: counted, not timed, so that it holds on a busy machine and cannot creep back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from anytorch import lite

Op = Callable[[Any, Any], Any]


def calls(op: Op, *operands: Any) -> tuple[list[str], list[str]]:
    """The functions written in Python, and those in C, that `op` calls."""
    python: list[str] = []
    c: list[str] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            python.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
        elif event == "c_call":
            c.append(argument.__name__)

    op(*operands)  # whatever is loaded late is loaded now
    sys.setprofile(profile)
    try:
        op(*operands)
    finally:
        sys.setprofile(None)
    return python[1:], c[:-1]  # without `op` itself, and without setprofile


def pair(grad: bool = False) -> tuple[Any, Any]:
    return lite.tensor(np.ones((3, 3), "float32"), requires_grad=grad), lite.tensor(np.ones((3, 3), "float32"))


@pytest.mark.parametrize("op", [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b], ids=["add", "sub", "mul"])
def test_an_operator_is_one_call(op: Op) -> None:
    """The method itself, and NumPy's function, which the profiler does not see."""
    python, c = calls(op, *pair())
    assert (len(python), c) == (1, []), (python, c)


def test_a_plain_number_takes_the_short_way() -> None:
    python, c = calls(lambda a, b: a * 2.0, *pair())
    assert (len(python), c) == (1, []), (python, c)


def test_a_product_is_one_call_and_blas() -> None:
    python, c = calls(lambda a, b: a @ b, *pair())
    assert (len(python), c) == (1, ["dot"]), (python, c)


def test_made_and_computed_tensors_take_it_alike() -> None:
    made, computed = lite.CustomTensor([[1.0, 2.0]]), lite.ones(1, 2) + 1
    for a in (made, computed):
        for b in (made, computed):
            assert len(calls(lambda a, b: a + b, a, b)[0]) == 1


def test_the_short_way_is_left_where_it_would_be_wrong() -> None:
    """Mixed types follow torch's rules, a tensor that wants a gradient is recorded, and one number stays an array."""
    whole, single = lite.tensor([1, 2]), lite.tensor(2.0)
    assert (whole * 0.5).dtype == np.float32
    assert (lite.ones(2) + whole).dtype == np.float32
    assert (lite.ones(2, dtype="float16") * single).dtype == np.float16
    assert isinstance((single + single).data, np.ndarray)
    assert isinstance((single * 2.0).data, np.ndarray)
    a, b = pair(grad=True)
    assert (a + b).requires_grad
    assert (b * a).requires_grad
    assert (b @ a).requires_grad
    assert (a * 2.0).requires_grad
    a.requires_grad_(False)
    assert not (a + b).requires_grad


@pytest.mark.parametrize(
    ("op", "most"),
    [(lambda a, b: a + b, 11), (lambda a, b: a @ b, 13), (lambda a, b: a * 2.0, 19)],
    ids=["add", "matmul", "times a number"],
)
def test_a_recorded_op(op: Op, most: int) -> None:
    python, _ = calls(op, *pair(grad=True))
    assert len(python) <= most, python
