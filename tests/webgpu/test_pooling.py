"""Pooling against the CPU: PyTorch's own samples, forward and backward, and the cases they leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree
from tests.webgpu.test_matmul import make

pytestmark = pytest.mark.native


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_windows(webgpu: Any, dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    x = make(2, 3, 7, 9, dtype=dtype, grad=True)

    def close(function: Any) -> None:
        agree(function, x, rtol=tolerance, atol=tolerance)

    close(lambda t: F.max_pool2d(t, 3, 2, 1))
    close(lambda t: F.avg_pool2d(t, 3, 2, 1))
    close(lambda t: F.adaptive_avg_pool2d(t, (3, 4)))
    close(lambda t: F.adaptive_max_pool2d(t, (3, 4)))


def test_settings(webgpu: Any) -> None:
    x = make(2, 3, 7, 9, grad=True)
    agree(lambda t: F.max_pool2d(t, (2, 3), dilation=2, ceil_mode=True, return_indices=True), x)
    agree(lambda t: F.avg_pool2d(t, 3, 2, 1, ceil_mode=True, count_include_pad=False), x)
    agree(lambda t: F.avg_pool2d(t, (3, 2), divisor_override=5), x)
    agree(lambda t: F.max_pool1d(t, 3, 2), make(2, 3, 9, grad=True))
    agree(lambda t: F.avg_pool1d(t, 3, 2), make(2, 3, 9, grad=True))
    agree(lambda t: F.max_pool3d(t, 2, 1, 1), make(1, 2, 4, 5, 4, grad=True))
    agree(lambda t: F.avg_pool3d(t, 2, 2), make(1, 2, 4, 5, 4, grad=True))
    agree(lambda t: F.adaptive_avg_pool3d(t, (2, 3, 1)), make(1, 2, 4, 5, 4, grad=True))
    agree(lambda t: F.max_pool2d(t, 2), make(3, 6, 6, grad=True))  # without a batch


def test_a_nan_wins(webgpu: Any) -> None:
    x = make(1, 1, 6, 6).clone()
    x[0, 0, 2, 2] = float("nan")
    x[0, 0, 5, 5] = float("-inf")
    agree(lambda t: F.max_pool2d(t, 3, return_indices=True), x)


def test_integers(webgpu: Any) -> None:
    agree(lambda t: F.max_pool2d(t, 2, return_indices=True), make(1, 2, 6, 6, dtype=torch.int32) - 40)


def test_layouts(webgpu: Any) -> None:
    x = make(2, 4, 6, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    agree(lambda t: F.max_pool2d(t, 2), x)
    agree(lambda t: F.avg_pool2d(t[:, :, 1:, ::2], 2), make(2, 4, 6, 8, grad=True))
    assert F.max_pool2d(x.detach().to("webgpu"), 2).is_contiguous(memory_format=torch.channels_last)


def test_maxima_go_back_to_their_places(webgpu: Any) -> None:
    for layout in (torch.contiguous_format, torch.channels_last):
        x = make(2, 3, 6, 8).contiguous(memory_format=layout)
        y, places = F.max_pool2d(x, 2, return_indices=True)
        y.requires_grad_()
        agree(lambda t, i: F.max_unpool2d(t, i, 2), y, places)
        agree(lambda t, i: F.max_unpool2d(t, i, 2, output_size=(7, 9)), y, places)
        agree(lambda t, i: F.max_unpool2d(t[0], i[0], 2), y, places)
        ours = F.max_unpool2d(y.detach().to("webgpu"), places.to("webgpu"), 2)
        assert ours.stride() == F.max_unpool2d(y, places, 2).stride()
    y, places = F.max_pool3d(make(2, 3, 4, 6, 8), 2, return_indices=True)
    agree(lambda t, i: F.max_unpool3d(t, i, 2), y.requires_grad_(), places)
    agree(lambda t, i: F.max_unpool2d(t, i, 2), torch.zeros(0, 3, 2, 2), torch.zeros(0, 3, 2, 2, dtype=torch.int64))
