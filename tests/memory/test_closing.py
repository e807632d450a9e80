"""A closed model gives everything back at once, keeps what was on the device, and says what is gone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import anytorch
from anytorch.errors import UsageError
from anytorch.memory.parked import PARKED
from anytorch.memory.reader import THREAD_NAME

MB = 2**20
WAYS: dict[str, dict[str, Any]] = {
    "disk": {"device_budget": 1.2 * MB},
    "host": {"device_budget": 1.2 * MB, "host_budget": 8 * MB},
    "packed": {"device_budget": 1.6 * MB, "rest_format": "int8"},
}


@contextmanager
def no_collector() -> Iterator[None]:
    """It would hide what is only kept by a circle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tensor_nbytes() -> int:
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, given: dict[str, Any]) -> dict[str, Any]:
    return given | WAYS[request.param]


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_it_goes_with_its_last_user(models: Any, way: dict[str, Any], disk: Path, activations: str) -> None:
    with no_collector():
        before = tensor_nbytes()
        model = models.made()
        anytorch.memory.fit(model, "cpu", **way)
        anytorch.memory.activations(model.train(), activations)
        model(models.IDS).sum().backward()
        with torch.no_grad():
            model(models.IDS)
        gone, handle = weakref.ref(model), anytorch.memory.fitted(model)
        handle.close()
        handle.close()
        assert not disk.exists() or not list(disk.iterdir())
        assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
        assert handle.stats()["levels"]["device"]["peak"] > 0 and "resident" in handle.explain()
        del model
        assert gone() is None, "somebody keeps the model"
        assert tensor_nbytes() - before < 1000  # an element of each dtype stands for all weights that are away


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_so_does_one_that_was_unfitted(models: Any, way: dict[str, Any], activations: str) -> None:
    with no_collector():
        model = models.made()
        anytorch.memory.fit(model, "cpu", **way)
        anytorch.memory.activations(model.train(), activations)
        model(models.IDS).sum().backward()
        gone = weakref.ref(anytorch.memory.unfit(model))
        assert not [name for name in model.__dict__ if name.startswith("_anytorch")]
        del model
        assert gone() is None, "somebody keeps the model"


def test_what_is_left_is_an_ordinary_model_without_its_streamed_weights(models: Any, way: dict[str, Any]) -> None:
    model = models.made()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(models.IDS)
    anytorch.memory.fit(model, "cpu", **way)
    handle = anytorch.memory.fitted(model)
    lost = [name for name, parameter in model.named_parameters() if isinstance(parameter, PARKED)]
    handle.close()
    assert lost and "forward" not in model.layers[0].__dict__
    for ask in (lambda: model(models.IDS), model.state_dict, lambda: model.get_parameter(lost[0]).sum()):
        with pytest.raises(UsageError, match="was freed when its fitted model was closed"):
            ask()
    for ask in (handle.unfit, lambda: handle.tensors("layers.0")):
        with pytest.raises(UsageError, match="is closed"):
            ask()
    with pytest.raises(UsageError, match="not fitted"):
        anytorch.memory.fitted(model)
    kept = [name for name, _ in model.named_parameters() if name not in lost]
    assert all(torch.equal(model.get_parameter(name), state[name]) for name in kept)
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(models.IDS), expected)


def test_backward_after_closing_says_so_and_holds_no_memory(models: Any, way: dict[str, Any]) -> None:
    before = tensor_nbytes()
    model = models.made()
    anytorch.memory.fit(model, "cpu", **way)
    loss = model(models.IDS).sum()
    anytorch.memory.fitted(model).close()
    with pytest.raises(UsageError, match="is closed"):
        loss.backward()
    del model
    gc.collect()
    assert tensor_nbytes() - before < 0.5 * MB, "a graph that is left keeps activations, not the ring"
    del loss
