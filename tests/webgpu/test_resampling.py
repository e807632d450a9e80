"""Upsampling, padding and unfolding against the CPU, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree
from tests.webgpu.test_matmul import make

pytestmark = pytest.mark.native

INPUTS = {1: (2, 3, 7), 2: (2, 3, 5, 6), 3: (1, 2, 4, 3, 5)}
MODES = [
    *[(mode, rank) for mode in ("nearest", "nearest-exact") for rank in (1, 2, 3)],
    ("linear", 1),
    ("bilinear", 2),
    ("trilinear", 3),
    ("bicubic", 2),
]


@pytest.mark.parametrize(("mode", "rank"), MODES)
def test_upsampling(webgpu: Any, mode: str, rank: int) -> None:
    x = make(*INPUTS[rank], grad=True)
    agree(lambda t: F.interpolate(t, scale_factor=1.7, mode=mode), x, atol=1e-4)
    agree(lambda t: F.interpolate(t, size=[3] * rank, mode=mode), x, atol=1e-4)
    if "linear" in mode or "cubic" in mode:
        agree(lambda t: F.interpolate(t, size=[9] * rank, mode=mode, align_corners=True), x, atol=1e-4)


def test_halves_and_layouts(webgpu: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = make(1, 2, 5, 6, dtype=dtype, grad=True)
        agree(lambda t: F.interpolate(t, scale_factor=2, mode="bilinear"), x, rtol=3e-2, atol=3e-2)
    last = make(2, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    agree(lambda t: F.interpolate(t, scale_factor=2), last)
    assert F.interpolate(last.to("webgpu"), scale_factor=2).stride() == F.interpolate(last, scale_factor=2).stride()


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding(webgpu: Any, mode: str) -> None:
    for rank, widths in ((1, (2, 1)), (2, (1, 2, 3, 0)), (3, (1, 1, 0, 2, 2, 1))):
        agree(lambda t, w=widths: F.pad(t, w, mode=mode), make(*INPUTS[rank], grad=True))
    agree(lambda t: F.pad(t, (1, 2), mode=mode), make(2, 3, 7, dtype=torch.int64) if mode == "constant" else make(3, 7))


def test_unfolding(webgpu: Any) -> None:
    agree(lambda t: F.unfold(t, (2, 3), dilation=2, padding=1, stride=2), make(2, 3, 7, 8, grad=True))
    agree(lambda t: F.fold(t, (7, 8), (2, 3), padding=1, stride=2), make(2, 18, 16, grad=True))
    agree(lambda t: F.pixel_shuffle(t, 2), make(2, 8, 3, 3, grad=True))
