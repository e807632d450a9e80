"""Every Triton kernel, compiled for the device, against the CPU's answer in float64 (attention: float32).

Those of a forecast's attention and of its choices work on the memory of a step: test_forecast.py has them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.device

FORMATS = ["int8", "int8-g64", "int4", "int4-sym-g32", "int2", "nvfp4", "mxfp4", "nf4"]
TEXTS = [
    ((7, 1, 30, 13, 32), 4, 4, 32, 0, False),
    ((7, 60, 64, 33), 4, 2, 16, 0, True),
    ((100, 128, 3), 2, 2, 64, 5, False),
    ((40, 20), 4, 1, 32, 6, True),
    ((150, 65, 1, 129), 2, 2, 32, 0, False),
    ((140, 3), 2, 1, 16, 70, True),
]


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far the device's answer is from the CPU's, as a share of its size."""
    wanted = wanted.double()
    return float((found.cpu().double() - wanted).norm() / wanted.norm())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the interpreter: tokens of nobody
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "width", "window", "causal"), TEXTS)
def test_attention_of_texts(
    triton: Any, lengths: tuple[int, ...], heads: int, kv_heads: int, width: int, window: int, causal: bool
) -> None:
    from anytorch.text.encoders.kernels import attend_short, fits
    from anytorch.text.encoders.layouts import OneByOne

    torch.manual_seed(0)
    # Half precision is what they are for on a device; the interpreter has float32 to show that the sums are right.
    dtype, most = (torch.float32, 1e-5) if triton.type == "cpu" else (torch.bfloat16, 2e-2)
    total, longest = sum(lengths), max(lengths)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), total, total], dtype=torch.int32)
    qkv = torch.randn(total + 9, heads + 2 * kv_heads, width).to(dtype)
    q, k, v = qkv.float().split((heads, kv_heads, kv_heads), 1)
    layout = OneByOne(starts, total + 9, longest, starts.tolist())
    wanted = layout.attend(q, k, v, window=window, causal=causal, bias=None)[:total]
    tried = 0
    for blocks in (0, 2):
        if fits(longest, width, blocks):
            there = qkv.to(triton).split((heads, kv_heads, kv_heads), 1)
            found = attend_short(*there, starts.to(triton), longest, window=window, causal=causal, blocks=blocks)
            assert apart(found[:total], wanted) < most, blocks
            tried += 1
    assert tried


@pytest.mark.parametrize(("width", "bias"), [(384, True), (48, False), (768, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_addition_and_norm(triton: Any, width: int, bias: bool, dtype: torch.dtype) -> None:
    from anytorch.text.encoders.kernels import add_norm

    torch.manual_seed(0)
    x, y, norm = torch.randn(37, width).to(dtype), torch.randn(37, width).to(dtype), nn.LayerNorm(width, bias=bias)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(width).to(dtype))
        wanted = norm.double()(x.double() + y.double())
        found = add_norm(x.to(triton), y.to(triton), norm.to(triton, dtype))
    assert found.dtype == dtype and apart(found, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("name", FORMATS)
def test_products_with_packed_weights(triton: Any, name: str) -> None:
    from anytorch.quant import pack, unpack
    from anytorch.quant.kernels.triton import FewRows, ManyRows, UnpackFirst

    torch.manual_seed(0)
    rows, columns, m = 40, 200, 3  # tiles that are not full, and a last group with codes beyond the columns
    packed, bias, x = pack(torch.randn(rows, columns), name), torch.randn(rows), torch.randn(m, columns)
    wanted = x.double() @ unpack(packed, torch.float64).t() + bias.double()
    there = packed.to(triton)
    for kernel in (FewRows(8, 64, 2), FewRows(16, 16, 4), ManyRows(16, 32, 32, 4), UnpackFirst()):
        found = kernel.prepare(there, bias.to(triton), x.dtype).run(x.to(triton))
        assert apart(found, wanted) < 2e-3, kernel.name


@pytest.mark.parametrize("rows", [5, 20, 70])
def test_products_of_a_forecast(triton: Any, rows: int) -> None:
    """Every kind of product, cut as it is built in and in ways that are tried."""
    from anytorch.forecast.kernels import choice
    from anytorch.forecast.kernels.products import Products, Work, candidates, error_of
    from anytorch.forecast.kernels.row_step import Tiles

    torch.manual_seed(0)

    def on(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(triton)

    weight = on(96, 64) / 8
    ours = Products(triton, lambda product: None if product.rows > 64 else Tiles.of(product.rows).cut(product))
    for work in (
        Work(on(rows, 64), weight, on(rows, 96), bias=on(96), norm=on(64).abs()),
        Work(on(rows, 64), weight, on(rows, 48), norm=on(64).abs(), gated=True),
        Work(on(rows, 96), on(64, 96), on(rows, 64), bias=on(64), residual=on(rows, 64)),
        Work(on(rows, 2 * 64), weight, on(rows, 96), bias=on(96), per_head=48),
    ):
        ways = [way for way in candidates(work.product, ours.built_in(work.product)) if way is not None]
        for way in (ways[0], ways[1], ways[-1]):  # the built-in one, the most promising, and another kind
            for _ in range(2):  # the counters are where they were
                work.out.zero_()
                ours.compute(work, way)
            assert error_of(work)(work.out) <= choice.MOST_ERROR, (str(work.product), str(way))
