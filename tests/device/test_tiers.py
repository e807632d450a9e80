"""Models larger than the device may hold: the same answers, gradients and trained weights as on the CPU, within budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.memory.models import IDS, made
from torch import nn

import anytorch
from anytorch.memory import TieredOptimizer
from anytorch.memory.types import Speeds

pytestmark = pytest.mark.device

MB = 2**20
# The model has 3.1 MB in six layers of 0.51 MB.
SHAPES: dict[str, dict[str, float]] = {
    "device, host and disk": {"device_budget": 1.2 * MB, "host_budget": 3.2 * MB},
    "device and host": {"device_budget": 1.2 * MB, "host_budget": 8 * MB},
    "leaf modules": {"device_budget": 0.45 * MB, "host_budget": 8 * MB},
    "everything fits": {"device_budget": 8 * MB},
}


def within(model: nn.Module) -> None:
    for level, use in anytorch.memory.fitted(model).stats()["levels"].items():
        assert use["peak"] <= use["capacity"], level


@pytest.fixture(params=SHAPES, ids=str)
def budgets(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"disk": tmp_path / "disk", "speeds": Speeds(10.0, 2.0), **SHAPES[request.param]}


def test_answers(accelerator: torch.device, budgets: dict[str, Any]) -> None:
    model = made()
    expected = model(IDS).detach()
    anytorch.memory.fit(model, accelerator, **budgets)
    with torch.no_grad():
        for _ in range(3):
            found = model(IDS.to(accelerator))
            assert found.device.type == accelerator.type
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    within(model)
    anytorch.memory.unfit(model)


def test_gradients(accelerator: torch.device, budgets: dict[str, Any]) -> None:
    """The weights of a layer are overwritten after its forward; backward fetches them again."""
    model = made()
    inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))

    def gradients(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        out = x
        for layer in model.layers:
            out = layer(out)
        found = torch.autograd.grad(out.square().sum(), [x, *model.layers.parameters()])
        return [gradient.cpu() for gradient in found]

    expected = gradients(inputs)
    anytorch.memory.fit(model, accelerator, **budgets)
    for _ in range(2):
        for found, wanted in zip(gradients(inputs.to(accelerator)), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    within(model)
    anytorch.memory.unfit(model)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_training(accelerator: torch.device, tmp_path: Path, overlap: Any) -> None:
    """Three steps of AdamW whose weights and states rest beside the device."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
    model = copy.deepcopy(plain)
    layer = 4 * 65 * 64
    anytorch.memory.fit(
        model, accelerator, device_budget=3 * layer, host_budget=60 * layer, host_reserve=8 * layer, disk=tmp_path
    )
    ours = TieredOptimizer(model, torch.optim.AdamW, overlap=overlap, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    assert len(ours.fitted.rest.host) >= 3, "weights rest on the host"
    for number in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(number))
        losses = []
        for network, optimizer, given in ((plain, theirs, x), (model, ours, x.to(accelerator))):
            loss = network(given).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    ours.wait()
    found = model.state_dict()
    for name, wanted in plain.state_dict().items():
        torch.testing.assert_close(found[name].cpu(), wanted, rtol=1e-3, atol=1e-3)
    ours.close()
