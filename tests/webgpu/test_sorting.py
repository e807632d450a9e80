"""Sorting, top-k, medians, search, unique elements and histograms against the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.webgpu.agree import adapter_manner, agree, on_device  # noqa: F401  (the fixture `manner`)
from tests.webgpu.test_reductions import make

pytestmark = pytest.mark.native


@pytest.mark.parametrize("shape", [(1,), (2,), (37,), (3, 300), (4, 7, 5)])
def test_sort_every_dimension(manner: str, shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        for descending in (False, True):
            agree(
                lambda x, d=dim, r=descending: x.sort(dim=d, descending=r, stable=True), make(*shape).round(decimals=1)
            )


@pytest.mark.parametrize("length", [1023, 1024, 1025, 5000])
def test_rows_longer_than_a_block(manner: str, length: int) -> None:
    agree(lambda x: x.sort(dim=1, stable=True), make(2, length).round(decimals=2))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
)
def test_dtypes(manner: str, dtype: torch.dtype) -> None:
    x = make(3, 130, dtype=dtype)
    agree(lambda x: (x.sort(dim=1, stable=True), x.sort(dim=0, stable=True, descending=True)), x)


def test_int64_beyond_32_bits(manner: str) -> None:
    x = torch.randint(-(2**62), 2**62, (300,))
    agree(lambda x: (x.sort(stable=True), x.topk(5)), x)


def test_nan_zeros_and_infinities(manner: str) -> None:
    x = torch.tensor([0.0, -0.0, math.nan, 1.0, -math.inf, math.inf, -1.0, math.nan, 0.0, -0.0] * 5)
    for descending in (False, True):
        agree(lambda x, r=descending: x.sort(stable=True, descending=r), x)
    agree(lambda x: (x.topk(12)[0], x.topk(12, largest=False)[0], x.kthvalue(7)[0]), x)


@pytest.mark.parametrize("length", [10, 700, 6000])
def test_topk(manner: str, length: int) -> None:
    x = torch.randperm(3 * length, generator=torch.Generator().manual_seed(1)).float().view(3, length).requires_grad_()
    for k in (1, 7, length // 2, length):
        agree(lambda x, k=k: (x.topk(k), x.topk(k, largest=False)), x)
    agree(lambda x: x.topk(2, 0), x)


def test_values_of_topk_with_ties(manner: str) -> None:
    x = make(4, 3000).round()
    values, indices = on_device(x).topk(40, 1)
    torch.testing.assert_close(values.cpu(), x.topk(40, 1)[0])
    torch.testing.assert_close(x.gather(1, indices.cpu()), values.cpu())
    assert all(row.unique().numel() == 40 for row in indices.cpu())


def test_gradients(webgpu: Any) -> None:
    agree(lambda x: (x.sort(1)[0], x.topk(3, 1)[0], x.kthvalue(2, 1)[0], x.median(1)[0]), make(4, 9, grad=True))


def test_medians(manner: str) -> None:
    x = make(5, 31).clone()
    x[1, 3] = x[1, 9] = math.nan
    x[2, :] = math.nan
    agree(
        lambda x: (x.median(1)[0], x.median(0)[0], x.nanmedian(1)[0], x.nanmedian(0)[0], x.median(), x.nanmedian()), x
    )
    agree(lambda x: (x.median(1), x.kthvalue(3, 0, keepdim=True), x.median()), make(5, 31))
    agree(lambda x: (x.median(1)[0], x.median()), make(5, 31, dtype=torch.int64))
    agree(lambda x: x.quantile(0.3, dim=1), make(5, 31))


def test_kthvalue_out_of_range(webgpu: Any) -> None:
    with pytest.raises(RuntimeError, match="out of range"):
        torch.ones(3, device="webgpu").kthvalue(4)
    with pytest.raises(IndexError, match="Expected reduction dim 1 to have non-zero size"):
        torch.ones(3, 0, device="webgpu").kthvalue(1)


@pytest.mark.parametrize("right", [False, True])
def test_search(webgpu: Any, right: bool) -> None:
    edges, values = make(3, 40).sort(1)[0], make(3, 17)
    agree(lambda e, v: torch.searchsorted(e, v, right=right), edges, values)
    agree(lambda e, v: torch.searchsorted(e, v, right=right, out_int32=True), edges, edges[:, ::3].contiguous())
    agree(lambda e, v: torch.bucketize(v, e, right=right), edges[0].clone(), values)
    whole = torch.tensor([1, 3, 3, 7, 9])
    agree(lambda e, v: torch.bucketize(v, e, right=right), whole, torch.arange(11))
    agree(lambda e: torch.bucketize(3, e, right=right), whole)
    agree(lambda e: torch.searchsorted(e, 3.5, right=right), edges[0].clone())


def test_search_with_a_sorter(webgpu: Any) -> None:
    x = make(30)
    agree(lambda x, v: torch.searchsorted(x, v, sorter=x.argsort()), x, make(8))


def test_unique(manner: str) -> None:
    for x in (
        make(4, 50).round(),
        make(300, dtype=torch.int64),
        make(20, dtype=torch.bool),
        torch.tensor(3.0),
        torch.empty(0),
    ):
        agree(lambda x: x.unique(return_inverse=True, return_counts=True), x)
        agree(lambda x: x.unique(), x)
    agree(lambda x: x.unique_consecutive(return_inverse=True, return_counts=True), make(200).round().sort()[0])


def test_histogram(webgpu: Any) -> None:
    x = make(500)
    agree(lambda x: (torch.histc(x, 10, -2, 2), torch.histc(x, 7)), x)


def test_empty_and_out(webgpu: Any) -> None:
    agree(lambda x: (x.sort(1), x.topk(2, 1)), torch.empty(0, 4))
    agree(lambda x: x.topk(0), torch.ones(4))
    values, indices = torch.empty(4, device="webgpu"), torch.empty(4, dtype=torch.int64, device="webgpu")
    torch.sort(torch.tensor([3.0, 1.0, 2.0, 0.0], device="webgpu"), out=(values, indices))
    assert values.tolist() == [0, 1, 2, 3] and indices.tolist() == [3, 1, 2, 0]


def test_mode(webgpu: Any) -> None:
    for x in (make(5, 40, dtype=torch.int64), make(3, 60).round(), make(7)):
        agree(lambda x: (x.mode(-1)[0], x.mode(0, keepdim=True)[0]), x)
        values, indices = on_device(x).mode(-1, keepdim=True)
        torch.testing.assert_close(x.gather(-1, indices.cpu()), values.cpu())
