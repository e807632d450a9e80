"""Chains with reductions, compiled: one kernel, eager's answers and gradients, on both manners of adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.webgpu.agree import adapter_manner  # noqa: F401  (the fixture `manner`)

from anytorch.gpu.runtime import open_runtime

pytestmark = pytest.mark.usefixtures("webgpu", "manner", "ours")


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def layer_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * w


def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square().sum(-1)


def two_dimensions(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x).sum((-1, -2)) * 2


def rows_and_elements(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    smallest = x.amin(-1, keepdim=True)
    return x - smallest, smallest.exp()


def make(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "rms_norm": (rms_norm, (make(64, 96), make(96))),
    "softmax": (softmax, (make(40, 33),)),
    "layer_norm": (layer_norm, (make(4, 16, 50), make(50))),
    "a long row": (layer_norm, (make(9, 3000), make(3000))),
    "distances": (distances, (make(64, 96), make(64, 96))),
    "two dimensions": (two_dimensions, (make(16, 8, 10),)),
    "rows and elements": (rows_and_elements, (make(20, 64),)),
    "NaN": (softmax, (torch.where(make(16, 40) > 2.2, torch.nan, make(16, 40)),)),
}


def compiled(function: Callable[..., Any], *values: torch.Tensor) -> tuple[Any, int]:
    """What the compiled function gives, and how many kernels it takes, once it has been searched."""
    from anytorch.graph.compiler import compile_graph

    runtime = open_runtime()
    made = torch.compile(function, backend=compile_graph)
    made(*values)
    runtime.synchronize()
    before = runtime.statistics.commands
    answer = made(*values)
    runtime.synchronize()
    return answer, runtime.statistics.commands - before


@pytest.mark.native
@pytest.mark.parametrize("name", CASES)
def test_is_one_kernel_and_right(name: str) -> None:
    function, values = CASES[name]
    made, kernels = compiled(function, *[value.to("webgpu") for value in values])
    assert kernels == 1
    torch.testing.assert_close(
        [t.cpu() for t in (made if isinstance(made, tuple) else (made,))],
        list(want if isinstance(want := function(*values), tuple) else (want,)),
        rtol=1e-4,
        atol=1e-5,
        equal_nan=True,
    )


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_eager(dtype: torch.dtype) -> None:
    x, w = make(64, 96).to(dtype), make(96).to(dtype)
    exact = rms_norm(x.double(), w.double())
    made, kernels = compiled(rms_norm, x.to("webgpu"), w.to("webgpu"))
    assert kernels == 1 and made.dtype is dtype
    assert (made.cpu().double() - exact).abs().max() <= (rms_norm(x, w).double() - exact).abs().max()


@pytest.mark.native
def test_gradients() -> None:
    x, w = make(32, 48).requires_grad_(), make(48).requires_grad_()
    rms_norm(x, w).square().sum().backward()
    there = [t.detach().to("webgpu").requires_grad_() for t in (x, w)]
    made, _ = compiled(rms_norm, *there)
    made.square().sum().backward()
    for ours, theirs in zip(there, (x, w), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).sum(0),
        lambda x: (x * 2).sum(),
        lambda x: (x * 2).var(-1),
        lambda x: distances(x.t(), x.t() * 2),
    ],
    ids=["over the first", "over all", "variance", "of columns"],
)
def test_what_is_not_fused_is_still_right(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = make(30, 40)
    made, _ = compiled(function, x.to("webgpu"))
    torch.testing.assert_close(made.cpu(), function(x), rtol=1e-4, atol=1e-4)
