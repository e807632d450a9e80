"""Kernels for long tensors on GPUs: several vectors per thread, the last of them ragged."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu import pointwise


@pytest.mark.parametrize("elements", [16, 20, 28, 36, 40, 1000])
def test_every_element_is_computed_once(fresh_plans: None, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    runtime = open_runtime()
    monkeypatch.setattr(runtime, "adapter", dataclasses.replace(runtime.adapter, kind="DiscreteGPU"))
    monkeypatch.setattr(pointwise, "STREAM", 16)
    a, b = torch.randn(elements), torch.randn(elements)
    x, y = a.to("webgpu"), b.to("webgpu")
    assert torch.equal((x + y).cpu(), a + b)
    assert torch.equal(x.mul_(y).cpu(), a * b)  # in place: nothing may be read after it was written
    assert torch.equal((a.half().to("webgpu") * 2).cpu(), a.half() * 2)
