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

# In layers of the model, which has six: what the device may hold, and the host.
SHAPES: dict[str, tuple[float, float | None]] = {
    "device, host and disk": (2.4, 6.4),
    "device and host": (2.4, 16),
    "leaf modules": (0.9, 16),
    "everything fits": (16, None),
}


@pytest.fixture(scope="session")
def width(accelerator: torch.device) -> int:
    """A layer of 0.5 MB for a CPU; on a device of 32 MB, so that its copies take a while."""
    return 128 if accelerator.type == "cpu" else 1024


def within(model: nn.Module) -> None:
    for level, use in anytorch.memory.fitted(model).stats()["levels"].items():
        assert use["peak"] <= use["capacity"], level


@pytest.fixture(params=SHAPES, ids=str)
def budgets(request: pytest.FixtureRequest, width: int, tmp_path: Path) -> dict[str, Any]:
    layer = 32 * width * width
    device, host = SHAPES[request.param]
    found = {"disk": tmp_path / "disk", "speeds": Speeds(10.0, 2.0), "device_budget": device * layer}
    return found if host is None else {**found, "host_budget": host * layer}


def test_answers(accelerator: torch.device, width: int, budgets: dict[str, Any]) -> None:
    model = made(width=width)
    expected = model(IDS).detach()
    anytorch.memory.fit(model, accelerator, **budgets)
    with torch.no_grad():
        for _ in range(3):
            found = model(IDS.to(accelerator))
            assert found.device.type == accelerator.type
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    within(model)
    anytorch.memory.unfit(model)


def test_gradients(accelerator: torch.device, width: int, budgets: dict[str, Any]) -> None:
    """The weights of a layer are overwritten after its forward; backward fetches them again."""
    model = made(width=width)
    inputs = torch.randn(3, width, generator=torch.Generator().manual_seed(1))

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
def test_training(accelerator: torch.device, width: int, tmp_path: Path, overlap: Any) -> None:
    """Three steps of AdamW whose weights and states rest beside the device."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)])
    model, begun = copy.deepcopy(plain), copy.deepcopy(plain)
    layer = 4 * (width + 1) * width
    anytorch.memory.fit(
        model, accelerator, device_budget=3 * layer, host_budget=60 * layer, host_reserve=8 * layer, disk=tmp_path
    )
    ours = TieredOptimizer(model, torch.optim.AdamW, overlap=overlap, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    assert len(ours.fitted.block_homes.host) >= 3, "weights rest on the host"
    for number in range(3):
        x = torch.randn(8, width, generator=torch.Generator().manual_seed(number))
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
    start = begun.state_dict()
    for name, wanted in plain.state_dict().items():
        assert float((found[name].cpu() - wanted).norm()) < 0.02 * float((wanted - start[name]).norm()), name
    ours.close()
