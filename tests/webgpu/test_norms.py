"""Layer, RMS, group and batch norm against the CPU, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import adapter_manner, agree, on_device  # noqa: F401  (the fixture `manner`)
from tests.webgpu.test_reductions import make

pytestmark = pytest.mark.native


def affine(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    weight = (make(*shape) * 0.5 + 1).to(dtype).requires_grad_()
    return weight, make(*shape, dtype=dtype, grad=True)


@pytest.mark.parametrize("length", [1, 2, 33, 768, 1500])
def test_layer_norm(manner: str, length: int) -> None:
    if length == 1:  # the CPU's gradient is rounding noise where it should be zero
        agree(lambda x: F.layer_norm(x, (1,)), make(3, 1))
        return
    weight, bias = affine(length)
    agree(lambda x, w, b: F.layer_norm(x, (length,), w, b), make(4, 3, length, grad=True), weight, bias, atol=1e-4)
    agree(lambda x: F.layer_norm(x, (length,)), make(5, length, grad=True), atol=1e-4)
    agree(lambda x, w: F.layer_norm(x, (length,), w), make(5, length, grad=True), weight, atol=1e-4)


@pytest.mark.parametrize("length", [2, 33, 768, 1500])
def test_rms_norm(manner: str, length: int) -> None:
    weight, _ = affine(length)
    agree(lambda x, w: F.rms_norm(x, (length,), w), make(4, 3, length, grad=True), weight, atol=1e-4)
    agree(lambda x: F.rms_norm(x, (length,), eps=1e-3), make(5, length, grad=True), atol=1e-4)


def test_several_normalised_dimensions(manner: str) -> None:
    weight, bias = affine(4, 5)
    agree(lambda x, w, b: F.layer_norm(x, (4, 5), w, b), make(3, 4, 5, grad=True), weight, bias, atol=1e-4)
    agree(lambda x, w: F.rms_norm(x, (4, 5), w), make(3, 4, 5, grad=True), weight, atol=1e-4)


def test_numbers_far_from_zero(manner: str) -> None:
    x = make(4, 600).double().add(1000)
    found = F.layer_norm(x.float().to("webgpu"), (600,)).cpu()
    torch.testing.assert_close(found.double(), F.layer_norm(x.float().double(), (600,)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(manner: str, dtype: torch.dtype) -> None:
    for length in (64, 65):
        weight, bias = affine(length, dtype=dtype)
        x = make(6, length, dtype=dtype, grad=True)
        agree(lambda x, w, b, n=length: F.layer_norm(x, (n,), w, b), x, weight, bias, rtol=2e-2, atol=2e-2)
        agree(lambda x, w, n=length: F.rms_norm(x, (n,), w), x, weight, rtol=2e-2, atol=2e-2)
    weight, bias = affine(6, dtype=dtype)
    x = make(2, 6, 5, 4, dtype=dtype, grad=True)
    agree(lambda x, w, b: F.group_norm(x, 3, w, b), x, weight, bias, rtol=2e-2, atol=2e-2)
    agree(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, weight, bias, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(manner: str, groups: int) -> None:
    weight, bias = affine(6)
    x = make(3, 6, 5, 7, grad=True)
    agree(lambda x, w, b: F.group_norm(x, groups, w, b), x, weight, bias, atol=1e-4)
    agree(lambda x: F.group_norm(x, groups), make(2, 6, 3, grad=True), atol=1e-4)


@pytest.mark.parametrize("shape", [(8, 5), (4, 5, 6), (3, 5, 4, 7), (2, 3, 4, 3, 2)])
def test_batch_norm_in_training(manner: str, shape: tuple[int, ...]) -> None:
    weight, bias = affine(shape[1])

    def normalised(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Any:
        mean, variance = m.clone(), v.clone()
        return F.batch_norm(x, mean, variance, w, b, True, 0.2, 1e-4), mean, variance

    statistics = (torch.zeros(shape[1]), torch.ones(shape[1]))
    agree(normalised, make(*shape, grad=True), weight, bias, *statistics, atol=1e-4)


def test_batch_norm_in_evaluation(manner: str) -> None:
    weight, bias = affine(5)
    mean, variance = make(5), make(5).abs() + 0.5
    agree(
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False),
        make(3, 5, 4, 6, grad=True),
        weight,
        bias,
        mean,
        variance,
    )
    agree(lambda x, m, v: F.batch_norm(x, m, v), make(3, 5, 4, grad=True), mean, variance)


def test_channels_last_is_kept(manner: str) -> None:
    x = make(2, 5, 4, 6).to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = affine(5)
    agree(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, weight, bias, atol=1e-4)
    out = F.batch_norm(on_device(x), None, None, training=True)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_a_module_learns_its_statistics(webgpu: Any) -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.BatchNorm2d(4).to("webgpu"), torch.nn.BatchNorm2d(4)
    for _ in range(3):
        x = torch.randn(5, 4, 3, 3) * 3 + 1
        ours(x.to("webgpu"))
        theirs(x)
    torch.testing.assert_close(ours.running_mean.cpu(), theirs.running_mean)
    torch.testing.assert_close(ours.running_var.cpu(), theirs.running_var)
    torch.testing.assert_close(ours.eval()(x.to("webgpu")).cpu(), theirs.eval()(x), rtol=1e-4, atol=1e-5)


def test_instance_norm(webgpu: Any) -> None:
    agree(lambda x: F.instance_norm(x), make(3, 4, 5, 6, grad=True), atol=1e-4)


def test_views_and_empty(webgpu: Any) -> None:
    agree(lambda x: F.layer_norm(x, (9,)), make(9, 6).t())
    agree(lambda x: F.layer_norm(x, (6,)), make(9, 14)[1:7, 2:14:2])
    agree(lambda x: F.layer_norm(x, (6,)), torch.empty(0, 6))
    agree(lambda x: F.rms_norm(x, (6,)), make(6, 9).t())


def test_shapes_that_do_not_fit(webgpu: Any) -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.layer_norm(torch.ones(3, 4, device="webgpu"), (5,))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        F.rms_norm(torch.ones(3, 4, device="webgpu"), (5,))
