"""What mixtures of experts need: counting whole numbers, and a product per group of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.native


def test_histogram_of_whole_numbers(webgpu: Any) -> None:
    chosen = torch.tensor([3, 0, 3, 7, 1, 3], dtype=torch.int32, device="webgpu")
    found = torch.histc(chosen, bins=8, min=0, max=7)
    assert found.dtype is torch.int32 and found.tolist() == [1, 1, 0, 3, 0, 0, 0, 1]


@pytest.mark.parametrize("limits", [(0, 0), (-2, 5), (3, 4)])
def test_whole_numbers_fall_where_floats_do(webgpu: Any, limits: tuple[int, int]) -> None:
    x = torch.tensor([[3, -9, 3, 7], [1, 4, 5, -2]])
    expected = torch.histc(x.float(), 5, *limits)
    assert torch.histc(x.to("webgpu"), 5, *limits).tolist() == expected.tolist()


@pytest.mark.parametrize("empty", [False, True])
def test_a_product_per_group(webgpu: Any, empty: bool) -> None:
    torch.manual_seed(0)
    ends = [3, 3, 10] if empty else [3, 8, 10]
    tokens = torch.randn(10, 16, device="webgpu", requires_grad=True)
    weights = torch.randn(3, 16, 8, device="webgpu", requires_grad=True)
    found = torch._grouped_mm(tokens, weights, torch.tensor(ends, dtype=torch.int32, device="webgpu"))
    x, w = (t.detach().cpu().requires_grad_() for t in (tokens, weights))
    expected = torch.cat([x[a:b] @ w[i] for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False))])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for mine, theirs in ((tokens, x), (weights, w)):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
