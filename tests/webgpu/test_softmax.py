"""Softmax and log-softmax against the CPU, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.webgpu.agree import adapter_manner, agree, on_device  # noqa: F401  (the fixture `manner`)
from tests.webgpu.test_reductions import make

pytestmark = pytest.mark.native

SHAPES = [(1,), (37,), (5, 70), (3, 1030), (4, 5, 6), (2, 3, 40, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_dimension(manner: str, shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        agree(lambda x, d=dim: (x.softmax(d), x.log_softmax(d)), make(*shape, grad=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(manner: str, dtype: torch.dtype) -> None:
    for shape, dim in (((5, 70), 1), ((5, 71), 1), ((6, 40), 0)):
        agree(
            lambda x, d=dim: (x.softmax(d), x.log_softmax(d)),
            make(*shape, dtype=dtype, grad=True),
            rtol=1e-2,
            atol=1e-2,
        )


def test_views(manner: str) -> None:
    base = make(9, 40)
    agree(lambda x: x.softmax(-1), base.t())
    agree(lambda x: x.log_softmax(-1), base[1:8, 3:33:2])
    agree(lambda x: x.softmax(0), base[:, :1].expand(9, 4))


def test_large_values_and_broken_rows(manner: str) -> None:
    x = make(6, 50).clone() * 100
    x[1, 3] = math.nan
    x[2, 4] = math.inf
    x[3, :] = -math.inf
    x[4, :25] = -math.inf
    agree(lambda x: (x.softmax(1), x.log_softmax(1)), x)


def test_scalar_and_empty(webgpu: Any) -> None:
    agree(lambda x: (x.softmax(0), x.log_softmax(-1)), torch.tensor(3.0))
    agree(lambda x: x.softmax(1), torch.empty(0, 3))
    agree(lambda x: x.softmax(1), torch.empty(3, 0))


def test_out(webgpu: Any) -> None:
    x = make(4, 9)
    out = torch.empty(4, 9, device="webgpu")
    torch.softmax(on_device(x), 1, out=out)
    torch.testing.assert_close(out.cpu(), x.softmax(1))


def test_masked(webgpu: Any) -> None:
    x, mask = make(4, 9, grad=True), torch.rand(4, 9) > 0.4
    agree(lambda x, mask: x.masked_fill(mask, -math.inf).softmax(-1).nan_to_num(), x, mask)


def test_the_attention_module_masks_its_scores(webgpu: Any) -> None:
    x, mask = make(2, 3, 4, 5), torch.rand(2, 5) > 0.6
    whole = mask.view(2, 1, 1, 5).expand(2, 3, 4, 5)
    found = torch.ops.aten._masked_softmax(on_device(x), on_device(mask), 3, 1).cpu()
    expected = x.masked_fill(whole, -math.inf).softmax(-1).masked_fill(whole, 0)
    torch.testing.assert_close(found, expected)
