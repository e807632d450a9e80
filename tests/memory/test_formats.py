"""Weights that rest in fewer bits: close to the original, the same every time, within budgets, and undone as unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import anytorch
from anytorch.memory.fitting import block_sizes
from anytorch.memory.formats import pack_block, packing_of, resting_nbytes, unpacked_nbytes
from anytorch.memory.images import packed
from anytorch.memory.units import find_units
from anytorch.quant.tensor import pack, unpack

MB = 2**20
ERRORS = {"int8": 0.01, "int4": 0.08, "fp4": 0.12, "nf4": 0.1}
SHAPES = [{"device_budget": 1.6 * MB}, {"device_budget": 1.6 * MB, "host_budget": 3 * MB}]


@pytest.mark.parametrize("format", ERRORS)
@pytest.mark.parametrize("budgets", SHAPES, ids=["disk", "host"])
def test_close_and_repeatable(models: Any, given: dict[str, Any], format: str, budgets: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS).detach()
    anytorch.memory.fit(model, "cpu", rest_format=format, **budgets, **given)
    handle = anytorch.memory.fitted(model)
    with torch.no_grad():
        found = model(models.IDS)
        assert torch.equal(found, model(models.IDS))
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < ERRORS[format]
    for use in handle.stats()["levels"].values():
        assert use["peak"] <= use["capacity"]
    streamed = [name for name, home in handle.plan.homes.items() if home != "device"]
    assert sum(handle.images[name].nbytes for name in streamed) < 0.3 * sum(
        handle.packings[name].live.nbytes for name in streamed
    )
    weight = model.state_dict()["layers.1.up.weight"]
    if handle.plan.homes["layers.1"] != "device":
        assert torch.equal(weight, unpack(pack(models.made().layers[1].up.weight, format)))
    anytorch.memory.unfit(model)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), found)


def test_what_fits_is_not_packed(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS).detach()
    anytorch.memory.fit(model, "cpu", rest_format="int4", device_budget=8 * MB, **given)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    anytorch.memory.unfit(model)


def test_gradients_pass_through(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", rest_format="int8", device_budget=1.6 * MB, **given)
    x = torch.randn(3, 128, requires_grad=True)

    def gradient() -> torch.Tensor:
        y = x
        for layer in model.layers:
            y = layer(y)
        return torch.autograd.grad(y.square().sum(), x)[0]

    streamed = gradient()
    anytorch.memory.unfit(model)
    assert torch.equal(streamed, gradient())


def test_sizes_are_known_before_anything_is_packed(models: Any) -> None:
    found = find_units(models.made())
    for name, group in found.groups.items():
        packing = packing_of(found, name, "int4")
        if packing is None:
            assert name in ("embed + head", "head"), "embeddings and biases rest as they are"
            continue
        stored = pack_block(packing, dict(zip(group.paths, group.parameters, strict=True)))
        assert packed(name, stored).nbytes == resting_nbytes(packing)
    assert unpacked_nbytes(found, "int4") == max(
        b.nbytes for n, b in block_sizes(found).items() if n.startswith("layers")
    )
    assert block_sizes(found, "int4")["layers.0"].resting < 0.2 * block_sizes(found)["layers.0"].nbytes


@pytest.mark.parametrize("budgets", SHAPES, ids=["disk", "host"])
def test_a_checkpoint_is_packed_as_the_model_would_be(
    models: Any, given: dict[str, Any], budgets: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    model = models.made()
    folder.mkdir()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    before = sorted(path.name for path in folder.iterdir())
    anytorch.memory.fit(model, "cpu", rest_format="int4", **budgets, **given)
    loaded = anytorch.memory.load(models.made, "cpu", weights=folder, rest_format="int4", **budgets, **given)
    handle = anytorch.memory.fitted(loaded)
    assert handle.packings and handle.plan.homes == anytorch.memory.fitted(model).plan.homes
    with torch.no_grad():
        assert torch.equal(loaded(models.IDS), model(models.IDS))
    for use in handle.stats()["levels"].values():
        assert use["peak"] <= use["capacity"]
    assert sorted(path.name for path in folder.iterdir()) == before
    anytorch.memory.unfit(loaded)
    anytorch.memory.unfit(model)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
