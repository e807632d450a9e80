"""Functions that torch.compile traces: they see the program's cuda, in one graph."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def fresh_traces() -> Any:
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_what_the_program_sees(cuda: Any) -> None:
    torch = cuda

    def asked(x: Any) -> Any:
        x = x.to("cuda") if torch.cuda.is_available() else x - 100
        if x.device.type == "cuda" and x.is_cuda and x.get_device() == 0:
            x = x * 2
        return x.cuda() + torch.ones(x.shape, device=x.device) + torch.arange(3, device="cuda")

    traced = torch.compile(asked, backend="aot_eager", fullgraph=True)
    result = traced(torch.ones(2, 3))
    assert result.is_cuda and result.tolist() == [[3.0, 4.0, 5.0]] * 2 == asked(torch.ones(2, 3)).tolist()


def test_the_truth_comes_back(cpu_wheel: None) -> None:
    """After the block a traced function sees the real device again."""
    import torch

    import anytorch

    with anytorch.stand_in("cpu"):
        inside = torch.compile(lambda x: x + (1 if x.is_cuda else 2), backend="eager", fullgraph=True)
        assert inside(torch.zeros(1).cuda()).item() == 1
    torch._dynamo.reset()
    outside = torch.compile(lambda x: x + (1 if x.is_cuda else 2), backend="eager", fullgraph=True)
    assert outside(torch.zeros(1)).item() == 2
