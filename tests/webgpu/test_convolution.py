"""Convolutions against the CPU: dimensions, strides, padding, dilation, groups, transposed; forward and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree
from tests.webgpu.test_matmul import make

from anytorch.gpu.wgsl.matmul import Schedule
from anytorch.webgpu.tuning import Tiling

pytestmark = pytest.mark.native

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": (F.conv1d, (2, 3, 9), (4, 3, 3), {"stride": 2, "padding": 1}),
    "2d": (F.conv2d, (2, 4, 7, 9), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    "dilated groups": (F.conv2d, (2, 4, 7, 9), (6, 2, 3, 2), {"dilation": 2, "padding": (2, 1), "groups": 2}),
    "depthwise": (F.conv2d, (2, 4, 5, 6), (4, 1, 3, 3), {"padding": 1, "groups": 4}),
    "1x1": (F.conv2d, (2, 4, 5, 6), (6, 2, 1, 1), {"groups": 2}),
    "3d": (F.conv3d, (1, 2, 5, 4, 6), (3, 2, 2, 3, 2), {"stride": (1, 2, 1), "padding": (1, 0, 1)}),
    "transposed": (F.conv_transpose2d, (2, 4, 5, 6), (4, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed groups": (F.conv_transpose1d, (2, 4, 5), (4, 3, 3), {"stride": 3, "groups": 2, "dilation": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients(webgpu: Any, case: str) -> None:
    function, x, weight, settings = CASES[case]
    channels = weight[1] * settings.get("groups", 1) if "transposed" in case else weight[0]
    tensors = [make(*size, grad=True) for size in (x, weight, (channels,))]
    agree(lambda *t: function(*t, **settings), *tensors, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(webgpu: Any, dtype: torch.dtype) -> None:
    x, weight = make(1, 4, 5, 6, dtype=dtype, grad=True), make(4, 4, 3, 3, dtype=dtype, grad=True)
    tolerance = 2e-2 if dtype is torch.float16 else 1e-1
    agree(lambda x, w: F.conv2d(x, w, padding=1), x, weight, rtol=tolerance, atol=tolerance)


def test_layouts(webgpu: Any) -> None:
    weight = make(4, 4, 3, 3)
    last = make(2, 4, 7, 9).contiguous(memory_format=torch.channels_last)
    agree(lambda x, w: F.conv2d(x, w, padding=1), last, weight)
    ours = F.conv2d(last.to("webgpu"), weight.to("webgpu"))
    assert ours.is_contiguous(memory_format=torch.channels_last)
    agree(lambda x, w: F.conv2d(x[:, :, ::2, 1:], w), make(2, 4, 14, 9), weight)
    agree(lambda x, w: F.conv2d(x[0], w), make(2, 4, 7, 9), weight)  # without a batch


def test_nothing(webgpu: Any) -> None:
    agree(lambda x, w: F.conv2d(x, w), make(0, 4, 7, 9, grad=True), make(4, 4, 3, 3, grad=True))


@pytest.mark.parametrize("splits", [1, 2])
def test_with_the_schedules_of_gpus(fresh_plans: None, monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    from anytorch.webgpu.ops import convolution

    choice = Tiling(Schedule("tiled", 16, 16, 8, 4, 4, unroll=1), splits)
    monkeypatch.setattr(convolution, "choose", lambda *_, **__: choice)
    tensors = [make(*size, grad=True) for size in ((2, 4, 5, 6), (6, 4, 3, 3), (6,))]
    agree(lambda *t: F.conv2d(*t, stride=2, padding=1), *tensors, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "side", "rows", "kernel", "stride", "padding", "groups"),
    [
        (8, 6, 12, 3, 1, 1, 1),  # tap by tap, columns in fours of one image
        (16, 7, 20, 3, 2, 1, 2),  # in groups; a column's neighbour is in another image
        (8, 4, 12, 1, 1, 0, 1),  # the input's own places, read in fours
        (8, 5, 4, 1, 2, 0, 1),
        (6, 6, 4, 3, 1, 1, 1),  # channels that do not fill a tile
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_tap_by_tap(
    fresh_plans: None, monkeypatch: pytest.MonkeyPatch, channels: int, side: int, rows: int, kernel: int, stride: int,
    padding: int, groups: int, bias: bool,
) -> None:  # fmt: skip
    from anytorch.webgpu.ops import convolution

    monkeypatch.setattr(convolution, "choose", lambda *_, **__: Tiling(Schedule("tiled", 16, 16, 8, 4, 4, unroll=1)))
    x, weight = make(2, channels, side, side), make(rows, channels // groups, kernel, kernel)
    tensors = [x, weight, *([make(rows)] if bias else [])]
    agree(lambda *t: F.conv2d(*t, stride=stride, padding=padding, groups=groups), *tensors, atol=1e-4)


PHASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "kernel 4, stride 2": (F.conv_transpose2d, (2, 8, 5, 6), (8, 4, 4, 4), {"stride": 2, "padding": 1}),
    "a kernel that stride does not divide": (
        F.conv_transpose2d, (2, 4, 3, 5), (4, 3, 5, 3), {"stride": (3, 2), "padding": (2, 1), "output_padding": (2, 1)},
    ),
    "a stride beyond the kernel": (F.conv_transpose2d, (1, 3, 4, 3), (3, 2, 2, 1), {"stride": (4, 3)}),
    "padding beyond the kernel": (F.conv_transpose1d, (2, 3, 9), (3, 4, 3), {"stride": 2, "padding": 5}),
    "groups": (F.conv_transpose1d, (2, 6, 7), (6, 2, 8), {"stride": 4, "padding": 2, "groups": 3}),
    "one direction, the other dilated": (
        F.conv_transpose2d, (1, 3, 4, 5), (3, 2, 4, 3), {"stride": (2, 1), "dilation": (1, 2), "padding": (1, 2)},
    ),
    "three directions": (F.conv_transpose3d, (1, 2, 3, 2, 4), (2, 3, 4, 3, 2), {"stride": 2, "padding": (1, 1, 0)}),
    "the gradient of a strided one": (F.conv2d, (2, 4, 11, 9), (6, 2, 5, 3), {"stride": (3, 2), "padding": 2, "groups": 2}),
    "the gradient of a patch embedding": (F.conv2d, (1, 3, 16, 13), (5, 3, 4, 4), {"stride": 4}),
}  # fmt: skip


@pytest.mark.parametrize("splits", [0, 1, 2])
@pytest.mark.parametrize("case", PHASES)
def test_by_phases(fresh_plans: None, monkeypatch: pytest.MonkeyPatch, case: str, splits: int) -> None:
    from anytorch.webgpu.ops import convolution

    if splits:  # as GPUs compute it; 0: as this adapter does
        choice = Tiling(Schedule("tiled", 16, 16, 8, 4, 4, unroll=1), splits)
        monkeypatch.setattr(convolution, "choose", lambda *_, **__: choice)
    function, x, weight, settings = PHASES[case]
    rows = weight[0] if function is F.conv2d else weight[1] * settings.get("groups", 1)
    agree(lambda *t: function(*t, **settings), *[make(*size, grad=True) for size in (x, weight, (rows,))], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True])
def test_halves_by_phases(webgpu: Any, dtype: torch.dtype, last: bool) -> None:
    x, weight = make(2, 4, 5, 6, dtype=dtype), make(4, 6, 4, 4, dtype=dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    tolerance = 2e-2 if dtype is torch.float16 else 1e-1
    agree(lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), x, weight, rtol=tolerance, atol=tolerance)


def test_only_what_a_kernel_reaches_is_computed(webgpu: Any) -> None:
    """Taps that do not exist are not read for 0 times infinity."""
    x, weight = make(1, 2, 4), make(2, 3, 3)
    x[0, 0, 1] = float("inf")
    agree(lambda x, w: F.conv_transpose1d(x, w, stride=2), x, weight)
