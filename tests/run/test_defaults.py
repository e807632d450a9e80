"""Defaults that name CUDA: optimizers made for graphs, and profilers. (Default devices are tested with tensors.)"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop"])
def test_optimizers_for_graphs(cuda: Any, device: str, name: str) -> None:
    model = cuda.nn.Linear(3, 1).cuda()
    optimizer = getattr(cuda.optim, name)(model.parameters(), lr=0.1, capturable=True)
    before = model.weight.detach().cpu()
    model(cuda.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert (model.weight.detach().cpu() != before).all()
    assert all(state["step"].is_cuda for state in optimizer.state.values())


def test_profilers(cuda: Any, fresh_ledger: Any) -> None:
    activity = cuda.profiler.ProfilerActivity
    with cuda.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
        cuda.ones(3).cuda().sum().item()
    table = profile.key_averages().table(sort_by="cpu_time_total", row_limit=3)
    assert "Self CPU" in table and "profiling of CUDA" in fresh_ledger.ignored


def test_the_default_goes_with_the_stand_in(device: str, cpu_wheel: None) -> None:
    import torch

    import anytorch

    with anytorch.stand_in(device):
        torch.set_default_device("cuda")
        assert torch.ones(2).is_cuda
    assert torch.ones(2).device.type == "cpu"
