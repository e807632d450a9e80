"""Which dtypes an `out=` may have is the op's to say: what the CPU takes is taken, with its numbers, and no more."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

Op = Callable[..., Any]
PAIRS: dict[str, tuple[Op, tuple[Any, ...]]] = {
    "max": (torch.max, (1,)),
    "min": (torch.min, (1,)),
    "sort": (torch.sort, (1,)),
    "topk": (torch.topk, (2, 1)),
    "kthvalue": (torch.kthvalue, (2, 1)),
    "median": (torch.median, (1,)),
    "nanmedian": (torch.nanmedian, (1,)),
    "mode": (torch.mode, (1,)),
    "cummax": (torch.cummax, (1,)),
}
SINGLE: dict[str, tuple[Op, tuple[Any, ...]]] = {
    "max": (torch.max, ()),
    "amax": (torch.amax, (1,)),
    "amin": (torch.amin, (0,)),
    "argmax": (torch.argmax, (1,)),
    "argmin": (torch.argmin, ()),
    "all": (torch.all, (1,)),
    "all of all": (torch.all, ()),
    "any": (torch.any, ((0, 1),)),
    "sum": (torch.sum, (1,)),
    "prod": (torch.prod, (1,)),
    "cumsum": (torch.cumsum, (1,)),
    "abs": (torch.abs, ()),
}
DTYPES = (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def outcome(op: Op, device: str, dtype: torch.dtype, arguments: tuple[Any, ...], outs: tuple[torch.dtype, ...]) -> Any:
    """What is written, or the kind of error that is raised instead."""
    x = torch.tensor([[3, 1, 2], [0, 5, 4]], dtype=dtype).to(device)
    targets = tuple(torch.empty(0, dtype=out, device=device) for out in outs)
    try:
        op(x, *arguments, out=targets if len(targets) > 1 else targets[0])
    except RuntimeError as exc:
        return type(exc)
    return [(target.dtype, target.tolist()) for target in targets]


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_their_places(webgpu: Any, name: str) -> None:
    op, arguments = PAIRS[name]
    for dtype, values, places in product(
        (torch.float32, torch.int32), DTYPES, (torch.int64, torch.int32, torch.float32)
    ):
        found, expected = (outcome(op, d, dtype, arguments, (values, places)) for d in ("webgpu", "cpu"))
        assert found == expected, (dtype, values, places)


@pytest.mark.parametrize("name", SINGLE)
def test_single_results(webgpu: Any, name: str) -> None:
    op, arguments = SINGLE[name]
    for dtype, out in product((torch.float32, torch.int32, torch.uint8), DTYPES):
        found, expected = (outcome(op, d, dtype, arguments, (out,)) for d in ("webgpu", "cpu"))
        if expected is not NotImplementedError:  # the CPU lacks the dtype
            assert found == expected, (dtype, out)


def test_complex_numbers_into_complex_targets(webgpu: Any) -> None:
    for dtype in (torch.complex64, torch.complex128):
        x = torch.tensor([3 + 4j, -5 + 12j], dtype=dtype)
        found = torch.abs(x.to("webgpu"), out=torch.empty(0, dtype=dtype, device="webgpu"))
        assert found.dtype is dtype and found.tolist() == [5, 13]
        with pytest.raises(RuntimeError, match="In-place abs is not supported for complex tensors"):
            x.to("webgpu").abs_()


def test_half_precision_complex_tensors_are_experimental_here_too(webgpu: Any) -> None:
    torch.set_warn_always(True)
    try:
        for make in (torch.empty, torch.zeros):
            with pytest.warns(UserWarning, match="ComplexHalf support is experimental"):
                made = make(3, dtype=torch.complex32, device="webgpu")
        with pytest.warns(UserWarning, match="ComplexHalf support is experimental"):
            torch.empty_like(made)
    finally:
        torch.set_warn_always(False)
