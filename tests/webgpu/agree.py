"""Running a function on the CPU and on the device and comparing, results and gradients; and a software GPU that is told to
behave like a hardware one, so that the kernels written for those run in tests too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device with the same strides and offset: views are what kernels get wrong."""
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    moved = base.to("webgpu").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return moved.detach().requires_grad_(tensor.requires_grad)


def close(ours: torch.Tensor, expected: torch.Tensor, **tolerance: Any) -> None:
    """A tensor on the device holds what one on the CPU holds."""
    assert ours.device.type == "webgpu"
    torch.testing.assert_close(ours.cpu(), expected, **tolerance)


def results(made: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(made)[0] if isinstance(value, torch.Tensor)]


def agree(
    function: Callable[..., Any], *tensors: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-5, **arguments: Any
) -> None:
    """The device's results are the CPU's; so are its gradients, for floating inputs that want them."""
    expected = results(function(*tensors, **arguments))
    ours = [on_device(tensor) for tensor in tensors]
    found = results(function(*ours, **arguments))
    assert len(found) == len(expected)
    for have, want in zip(found, expected, strict=True):
        assert have.device.type == "webgpu"
        exact = not want.is_floating_point()
        torch.testing.assert_close(
            have.cpu(), want, rtol=0 if exact else rtol, atol=0 if exact else atol, equal_nan=True
        )
    wanting = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    differentiable = [i for i, want in enumerate(expected) if want.requires_grad]
    if not wanting or not differentiable:
        return
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(expected[i].shape, generator=generator).to(expected[i].dtype) for i in differentiable]
    wanted = torch.autograd.grad([expected[i] for i in differentiable], [tensors[i] for i in wanting], cotangents)
    moved = [cotangent.to("webgpu") for cotangent in cotangents]
    given = torch.autograd.grad([found[i] for i in differentiable], [ours[i] for i in wanting], moved)
    for have, want in zip(given, wanted, strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=rtol * 4, atol=atol * 4, equal_nan=True)


@pytest.fixture(name="manner", params=["software", "hardware"])
def adapter_manner(request: pytest.FixtureRequest, fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test twice: with the kernels for software adapters, and with those for hardware ones."""
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    kind = "CPU" if request.param == "software" else "DiscreteGPU"
    monkeypatch.setattr(runtime, "adapter", dataclasses.replace(runtime.adapter, kind=kind))
    return str(request.param)
