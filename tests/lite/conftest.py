"""Torch is the reference of every op: run the same thing there, forward and backward, and compare."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from anytorch import lite
from anytorch.errors import DeviceUnavailable
from anytorch.lite.create import wrap

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3}


def close(ours: Any, theirs: Any, dtype: str = "float32", what: str = "") -> None:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape}, torch has {theirs.shape}"
    assert ours.dtype == theirs.dtype, f"{what}: type {ours.dtype}, torch has {theirs.dtype}"
    tolerance = TOLERANCE.get(dtype, 0)
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=what)


def check_against_torch(
    ours: Callable[..., Any],
    theirs: Callable[..., Any],
    *arrays: Any,
    grad: bool = True,
    dtype: str | None = None,
    device: str | None = None,
) -> None:
    """`ours` and `theirs` on the same arrays: equal results, and equal gradients of a weighted sum of each result."""
    dtype = dtype or max((str(a.dtype) for a in arrays if a.dtype.kind == "f"), default="float32")
    a = [wrap(x, device, requires_grad=grad and x.dtype.kind == "f") for x in arrays]
    # from_numpy keeps the strides, negative ones excepted, which torch does not have
    b = [torch.from_numpy(x.copy() if any(s < 0 for s in x.strides) else x) for x in arrays]
    b = [t.clone().requires_grad_() if grad and t.is_floating_point() else t for t in b]
    mine, other = ours(*a), theirs(*b)
    close(mine.detach(), other.detach(), dtype, "result")
    if not (grad and other.requires_grad):
        assert not mine.requires_grad
        return
    weight = np.cos(np.arange(other.numel())).reshape(tuple(other.shape)).astype(str(other.dtype)[6:])
    mine.backward(wrap(weight, device))
    other.backward(torch.from_numpy(weight))
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if y.grad is None:
            assert x.grad is None, f"gradient {i}: torch has none"
        else:
            assert x.grad is not None, f"gradient {i} is missing"
            close(x.grad, y.grad, dtype, f"gradient {i}")


@pytest.fixture(scope="session")
def adapter(missing: Callable[[str, str], Any]) -> None:
    """A GPU, or what plays one."""
    if importlib.util.find_spec("wgpu") is None:
        missing("webgpu-adapter", "wgpu is not installed")
    from anytorch.gpu.adapters import list_adapters

    try:
        found = list_adapters()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    if not found:
        missing("webgpu-adapter", "wgpu finds none")


@pytest.fixture(scope="session", name="against_torch", params=["host", "webgpu"])
def against_torch_fixture(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Twice: on the host, and with tensors on the GPU (llvmpipe in CI)."""
    if request.param == "host":
        return check_against_torch
    request.getfixturevalue("adapter")
    return partial(check_against_torch, device=request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    lite.seed(0)
