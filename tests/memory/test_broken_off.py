"""What is interrupted, uneven or resumed elsewhere loses nothing."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anytorch
from anytorch.errors import UsageError
from anytorch.memory import fitted_model
from anytorch.memory.training import TieredOptimizer

WIDTH = 64


class Fork(nn.Module):
    """One of its two layers takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        return x + torch.tanh(self.right(x) if right else self.left(x))


class Forks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fork() for _ in range(4))

    def forward(self, x: torch.Tensor, right: bool = False) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, right)
        return x


def fitted_forks(disk: Path, budget: str = "250KB") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Forks()
    model = copy.deepcopy(plain)
    anytorch.memory.fit(model, "cpu", device_budget=budget, reserve=150_000, disk=str(disk))
    assert "disk" in anytorch.memory.fitted(model).plan.homes.values()
    return plain, model


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    found = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("ways", [(False, False), (False, True), (True, False, False)])
def test_accumulated_gradients_of_blocks_that_are_used_in_part(tmp_path: Path, ways: tuple[bool, ...]) -> None:
    plain, model = fitted_forks(tmp_path)
    ours = TieredOptimizer(model, torch.optim.SGD, lr=0.1)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number, right in enumerate(ways):
        x = torch.full((2, WIDTH), 0.1 * (number + 1))
        model(x, right).sum().backward()
        plain(x, right).sum().backward()
    ours.step()
    theirs.step()
    assert_same(model, plain)


def test_an_interrupted_unfit_leaves_a_fitted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = fitted_forks(tmp_path)
    calls = 0

    def interrupted(parameter: nn.Parameter, values: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        original(parameter, values)

    original = fitted_model.wake
    with monkeypatch.context() as patch:
        patch.setattr(fitted_model, "wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            anytorch.memory.unfit(model)
    x = torch.ones(2, WIDTH)
    assert torch.equal(model(x), plain(x))
    anytorch.memory.unfit(model)
    assert_same(model, plain)


def test_a_failed_backward_holds_no_part_of_the_ring(tmp_path: Path) -> None:
    plain, model = fitted_forks(tmp_path)
    running: Any = anytorch.memory.fitted(model).running

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("in the middle")

    hooked = torch.ones(2, WIDTH, requires_grad=True)
    middle = hooked * 1
    middle.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(middle).sum().backward()
    assert not running._holding
    assert not any(held.users for held in running.mover._held.values())
    x = torch.ones(2, WIDTH)
    assert torch.equal(model(x), plain(x))


def test_resuming_with_another_budget_keeps_the_states(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: TieredOptimizer, steps: int) -> None:
        for _ in range(steps):
            model(torch.ones(2, WIDTH)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    _, model = fitted_forks(tmp_path / "a")
    optimizer = TieredOptimizer(model, torch.optim.AdamW, lr=0.01)
    train(model, optimizer, 2)
    anytorch.memory.save_training(tmp_path / "run", optimizer, step=2)
    train(model, optimizer, 2)
    homes = anytorch.memory.fitted(model).plan.homes
    for budget in ("175KB", "600KB"):
        other = Forks()
        anytorch.memory.fit(other, "cpu", device_budget=budget, reserve=150_000, disk=str(tmp_path / budget))
        assert anytorch.memory.fitted(other).plan.homes != homes
        again = TieredOptimizer(other, torch.optim.AdamW, lr=0.5)
        anytorch.memory.resume_training(tmp_path / "run", again)
        train(other, again, 2)
        assert_same(other, model)


def test_states_of_a_loaded_model_leave_no_files(tmp_path: Path) -> None:
    save_file(Forks().state_dict(), tmp_path / "model.safetensors")
    disk = tmp_path / "disk"
    model = anytorch.memory.load(
        Forks, "cpu", weights=tmp_path / "model.safetensors", device_budget="250KB", reserve=150_000, disk=str(disk)
    )
    optimizer = TieredOptimizer(model.requires_grad_(True), torch.optim.AdamW, lr=0.01)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    assert list(disk.glob("*/*.safetensors"))
    del model, optimizer
    gc.collect()
    assert not list(disk.glob("*/*"))


def test_weights_that_rest_in_fewer_bits_are_not_trained(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
    anytorch.memory.fit(model, "cpu", device_budget="120KB", reserve=60_000, disk=str(tmp_path), rest_format="int8")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UsageError, match=r"stored as int8.*cannot be trained"):
        TieredOptimizer(model, torch.optim.SGD, lr=0.1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
