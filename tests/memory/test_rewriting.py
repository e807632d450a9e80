"""New values for a fitted model come to where it rests: load_state_dict works as on any other model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import UsageError

LEVELS: dict[str, dict[str, Any]] = {
    "memory and disk": {"device_budget": "700KB"},
    "host": {"device_budget": "700KB", "host_budget": "16MB"},
    "host and disk": {"device_budget": "700KB", "host_budget": 2**21 + 2**20 + 2**17},
}


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("levels", LEVELS.values(), ids=LEVELS)
def test_a_whole_state(models: Any, given: dict[str, Any], levels: dict[str, Any]) -> None:
    model, other = models.made(), models.made(seed=7)
    before = model(models.IDS)
    anytorch.memory.fit(model, "cpu", **given, **levels)
    homes = set(anytorch.memory.fitted(model).plan.homes.values())
    assert homes >= ({"host"} if "host_budget" in levels else {"disk"})
    assert torch.equal(model(models.IDS), before)
    weights = [id(p) for p in model.parameters()]
    result = model.load_state_dict(other.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(model(models.IDS), other(models.IDS)) and same(model, other)
    assert [id(p) for p in model.parameters()] == weights
    model.load_state_dict({k: v.double() for k, v in models.made().state_dict().items()})  # another dtype is cast
    assert torch.equal(model(models.IDS), before)
    for level, use in anytorch.memory.fitted(model).stats()["levels"].items():
        assert use["peak"] <= use["capacity"], level
    anytorch.memory.unfit(model)
    assert same(model, models.made())
    model.load_state_dict(other.state_dict(), assign=True)  # nothing of ours is left


def test_a_part_of_the_model_and_a_part_of_a_layer(models: Any, given: dict[str, Any]) -> None:
    model, plain, other = models.made(), models.made(), models.made(seed=7)
    anytorch.memory.fit(model, "cpu", **given, **LEVELS["memory and disk"])
    for target in (model, plain):
        target.layers[2].load_state_dict(other.layers[2].state_dict())
        target.layers[4].up.load_state_dict(other.layers[4].up.state_dict())
        some = {"layers.5.down.weight": other.layers[5].down.weight, "layers.1.norm.bias": torch.ones(128)}
        found = target.load_state_dict(some, strict=False)
        assert "layers.0.up.weight" in found.missing_keys
    assert torch.equal(model(models.IDS), plain(models.IDS)) and same(model, plain)


def test_what_does_not_belong_is_refused_as_torch_does(models: Any, given: dict[str, Any]) -> None:
    model, plain = models.made(), models.made()
    anytorch.memory.fit(model, "cpu", **given, **LEVELS["memory and disk"])
    wrong = {**plain.state_dict(), "layers.3.up.weight": torch.zeros(3, 3), "another": torch.zeros(1)}
    del wrong["layers.0.norm.weight"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(wrong)
    for words in ("size mismatch for layers.3.up.weight", 'Missing key(s) in state_dict: "layers.0.norm', "another"):
        assert words in str(caught.value)
    assert same(model, plain)  # all others were the same values
    with pytest.raises(UsageError, match="assign=True"):
        model.load_state_dict(plain.state_dict(), assign=True)
    assert same(model, plain) and torch.equal(model(models.IDS), plain(models.IDS))


@pytest.mark.parametrize("levels", [LEVELS["memory and disk"], LEVELS["host"]], ids=["disk", "host"])
def test_blocks_that_rest_in_few_bits(models: Any, given: dict[str, Any], levels: dict[str, Any]) -> None:
    model, other = models.made(), models.made(seed=7)
    anytorch.memory.fit(other, "cpu", rest_format="int8", **given, **levels)
    anytorch.memory.fit(model, "cpu", rest_format="int8", **given, **levels)
    assert anytorch.memory.fitted(model).packings
    model.load_state_dict(models.made(seed=7).state_dict())
    assert torch.equal(model(models.IDS), other(models.IDS))


def test_a_disk_that_is_full_leaves_the_old_values(models: Any, given: dict[str, Any]) -> None:
    from anytorch.errors import OutOfMemory
    from anytorch.memory.spill import Spill

    model, plain, other = models.made(), models.made(), models.made(seed=7)
    anytorch.memory.fit(model, "cpu", **given, **LEVELS["memory and disk"])
    name = next(n for n, home in anytorch.memory.fitted(model).plan.homes.items() if home == "disk" and "layers" in n)
    number = int(name.split(".")[1])

    def full(self: Spill, tensors: Any) -> Any:
        raise OutOfMemory("the disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spill, "write", full)
        with pytest.raises(OutOfMemory, match="the disk is full"):
            model.layers[number].load_state_dict(other.layers[number].state_dict())
    assert same(model, plain) and torch.equal(model(models.IDS), plain(models.IDS))


def test_a_load_that_was_broken_off_and_another(models: Any, given: dict[str, Any]) -> None:
    model, other = models.made(), models.made(seed=7)
    anytorch.memory.fit(model, "cpu", **given, **LEVELS["memory and disk"])
    layer = model.layers[3].up
    load = layer._load_from_state_dict

    def broken(*arguments: Any, **named: Any) -> None:
        load(*arguments, **named)
        raise KeyboardInterrupt

    layer._load_from_state_dict = broken
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(other.state_dict())
    del layer._load_from_state_dict
    model(models.IDS)
    model.load_state_dict(other.state_dict())
    assert same(model, other), "a placeholder was taken for a value"
