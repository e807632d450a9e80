"""Sampling images and volumes at given places (`F.grid_sample`) against the CPU, forward and backward."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree, on_device
from tests.webgpu.test_matmul import make

MODES = ["bilinear", "nearest", "bicubic"]
PADDINGS = ["zeros", "border", "reflection"]
INPUTS = {2: ((2, 3, 5, 6), (2, 4, 3, 2)), 3: ((2, 3, 4, 5, 6), (2, 3, 4, 2, 3))}  # some places lie outside


@pytest.mark.native
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(("mode", "rank"), [(m, r) for m, r in product(MODES, (2, 3)) if (m, r) != ("bicubic", 3)])
def test_images_and_volumes(webgpu: Any, mode: str, rank: int, padding: str, align: bool) -> None:
    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=align)

    x, grid = (make(*shape, grad=True) for shape in INPUTS[rank])
    agree(sample, x, grid, atol=1e-4)
    agree(sample, x.detach(), grid, atol=1e-4)  # the gradient of the grid alone
    agree(sample, x, grid.detach() * 3, atol=1e-4)
    small = make(2, 3, *[1] * rank, grad=True)  # an axis of one element has no span to reflect in
    agree(sample, small, grid, atol=1e-4)


@pytest.mark.native
def test_layouts_halves_and_nothing(webgpu: Any) -> None:
    for rank in (2, 3):
        x, grid = (make(*shape) for shape in INPUTS[rank])
        agree(lambda a, b: F.grid_sample(a, b, align_corners=False), x.mT.contiguous().mT, grid.flip(1)[:, ::2])
        agree(lambda a, b: F.grid_sample(a, b, align_corners=False), x, grid[:, :0])
        agree(lambda a, b: F.grid_sample(a, b, align_corners=False), x[1:], grid[1:])
        for dtype in (torch.float16, torch.bfloat16):
            a, b = (on_device(t.to(dtype)).requires_grad_() for t in (x, grid))
            F.grid_sample(a, b, align_corners=False).sum().backward()
            c, d = (t.to(dtype).float().requires_grad_() for t in (x, grid))
            F.grid_sample(c, d, align_corners=False).sum().backward()
            for have, want in ((a, c), (b, d)):
                torch.testing.assert_close(have.grad.cpu().float(), want.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.native
@pytest.mark.parametrize("feature", ["with float atomics", "without"])
def test_many_places_that_read_one_element(
    webgpu: Any, feature: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients are added up, by the adapter's float atomics or by exchanges of words."""
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    if feature == "without":
        monkeypatch.setattr(runtime, "features", runtime.features - {"shader-float32-atomic"})
    elif "shader-float32-atomic" not in runtime.features:
        pytest.skip("the adapter has no float atomics")
    x, grid = make(1, 2, 3, 3, grad=True), make(1, 40, 50, 2) * 0.1
    agree(lambda a, b: F.grid_sample(a, b, align_corners=True), x, grid, rtol=1e-3, atol=1e-2)


@pytest.mark.native
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_places_that_are_no_numbers(webgpu: Any, mode: str, padding: str) -> None:
    """They lie outside, and border and reflection bring them to the first element. (For images, bilinear and zeros, the
    CPU alone says NaN.)"""
    wrong = torch.tensor([[math.nan, 0.0, 0.0], [0.0, math.inf, 0.0], [-math.inf, 0.0, 0.0], [0.1, 0.2, 0.3]])

    def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, grid, mode, padding, align_corners=False)

    agree(sample, torch.ones(1, 1, 3, 3, 3), wrong[None, None, None])
    if (mode, padding) != ("bilinear", "zeros"):
        agree(sample, torch.ones(1, 1, 3, 3), wrong[None, None, :, :2].contiguous())


def test_deterministic_sums_and_errors(webgpu: Any) -> None:
    """Where sums must have one order, the CPU adds them up."""
    x, grid = (make(*shape, grad=True) for shape in INPUTS[3])
    torch.use_deterministic_algorithms(True)
    try:
        agree(lambda a, b: F.grid_sample(a, b, align_corners=False), x, grid)
    finally:
        torch.use_deterministic_algorithms(False)
    for wrong in ((x, grid[:1]), (x, grid[..., :2]), (x, grid.double()), (x[0], grid[0])):
        for device in ("cpu", "webgpu"):
            with pytest.raises(RuntimeError):
                F.grid_sample(*(t.detach().to(device) for t in wrong), align_corners=False)
