"""Running sums, products and extremes against the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.webgpu.agree import adapter_manner, agree  # noqa: F401  (the fixture `manner`)
from tests.webgpu.test_reductions import make

pytestmark = pytest.mark.native

SCANS: dict[str, Any] = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: (x * 0.1 + 1).cumprod(d),
    "cummax": lambda x, d: x.cummax(d),
    "cummin": lambda x, d: x.cummin(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("shape", [(1,), (200,), (3, 70), (2, 1030), (4, 90, 3)])
def test_every_dimension(manner: str, name: str, shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        agree(SCANS[name], make(*shape), d=dim, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["cumsum", "cummax", "logcumsumexp"])
def test_a_row_of_many_blocks(manner: str, name: str) -> None:
    agree(SCANS[name], make(20_000), d=0, rtol=1e-3, atol=1e-2)
    agree(SCANS[name], make(2, 9_001), d=1, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_dtypes(manner: str, dtype: torch.dtype) -> None:
    x = make(3, 100, dtype=dtype)
    loose = {"rtol": 2e-2, "atol": 2e-1} if dtype.is_floating_point else {}
    agree(lambda x: (x.cumsum(1), x.cumsum(0), x.cumsum(1, dtype=torch.float32)), x, **loose)
    agree(lambda x: (x.cummax(1), x.cummin(0)), x)


def test_gradients(webgpu: Any) -> None:
    x = make(4, 20, grad=True)
    agree(lambda x: (x.cumsum(1), x.cummax(1)[0], x.cumprod(0), x.logcumsumexp(1)), x, atol=1e-4)


def test_ties_nan_and_infinity(manner: str) -> None:
    x = make(5, 90).round()
    x[1, 30] = math.nan
    x[2, 5], x[2, 50] = math.inf, -math.inf
    x[3, :] = -math.inf
    agree(lambda x: (x.cummax(1), x.cummin(1), x.logcumsumexp(1), x.cumsum(1)), x)


def test_views_scalars_empty_and_out(webgpu: Any) -> None:
    agree(lambda x: x.cumsum(0), make(6, 40).t()[3:, ::2])
    agree(lambda x: (x.cumsum(0), x.cummax(0)), torch.tensor(3.0))
    agree(lambda x: x.cumsum(1), torch.empty(3, 0))
    out = torch.empty(5, device="webgpu")
    torch.cumsum(torch.ones(5, device="webgpu"), 0, out=out)
    assert out.tolist() == [1, 2, 3, 4, 5]
    assert out.cumsum_(0).tolist() == [1, 3, 6, 10, 15]
