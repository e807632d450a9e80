"""A mode and torch.func: transforms find the weights, and `functional_call` computes with what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.memory.mode_models import EXACT, Model, off_again, small_model  # noqa: F401  (an autouse fixture)
from torch import nn

import anytorch
from anytorch.errors import UsageError
from anytorch.quant import QuantLinear


@pytest.fixture
def model() -> Model:
    return small_model()


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda model: torch.func.grad(lambda x: model(x).sum())])
def test_transforms_of_torch_func_find_the_weights(model: Model, transform: Callable[..., Any]) -> None:
    x = torch.randn(3, 64)
    plain = transform(model)(x)
    with anytorch.mode("memory", device="cpu", **EXACT):
        with torch.no_grad():
            model(x)
        assert isinstance(model.blocks[0].up, QuantLinear)
        torch.testing.assert_close(transform(model)(x), plain)


@pytest.mark.parametrize("kind", ["own", "parameters", "tensors", "state"])
@pytest.mark.parametrize("packed", [False, True])
def test_functional_call_computes_with_what_it_is_given(model: Model, kind: str, packed: bool) -> None:
    """Neither packed in place of the model's own weights, nor refused because those are packed."""
    x = torch.randn(3, 64)
    own = dict(model.named_parameters())
    with anytorch.mode("memory", device="cpu", **EXACT), torch.no_grad():
        if packed:
            model(x)
        assert isinstance(model.blocks[0].up, QuantLinear) == packed
        given: dict[str, Any] = {
            "own": lambda: own,
            "parameters": lambda: {name: nn.Parameter(torch.ones(value.shape) / 64) for name, value in own.items()},
            "tensors": lambda: {name: torch.ones(value.shape) / 64 for name, value in own.items()},
            "state": lambda: dict(model.state_dict()),
        }[kind]()
        values = {name: value.clone() for name, value in given.items()} if kind != "own" or not packed else None
        found = torch.func.functional_call(model, given, (x,))
        if values is not None:
            assert all(torch.equal(given[name], value) for name, value in values.items()), (
                "the caller's stay as they were"
            )
        model(x)
    torch.testing.assert_close(found, torch.func.functional_call(model, given, (x,)))
    assert dict(model.named_parameters()).keys() == own.keys()
    assert all(parameter is own[name] for name, parameter in model.named_parameters())


def test_functional_call_within_a_transform_finds_the_weights(model: Model) -> None:
    x = torch.randn(3, 64)
    own = {name: value.detach().clone() for name, value in model.named_parameters()}

    def gradients(of: dict[str, Any]) -> Any:
        return torch.func.grad(lambda given: torch.func.functional_call(model, given, (x,)).square().sum())(of)

    for given in (own, {"blocks.0.up.bias": own["blocks.0.up.bias"]}):
        plain = gradients(given)
        with anytorch.mode("memory", device="cpu", **EXACT):
            with torch.no_grad():
                model(x)
            torch.testing.assert_close(gradients(given), plain)


class Tries(nn.Module):
    """A model that calls a part of itself with other weights, as meta-learning does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = {name: torch.zeros(64, 128) for name in ("blocks.0.down.weight",)}
        found: torch.Tensor = torch.func.functional_call(self.inner, other, (x,))
        return found


def test_functional_call_where_weights_stay_packed_says_what_to_do(model: Model) -> None:
    x = torch.randn(3, 64)
    other = {"blocks.0.up.weight": torch.zeros(128, 64)}
    with anytorch.mode("memory", device="cpu", **EXACT) as mode, torch.no_grad():
        mode.apply(model)
        with pytest.raises(
            UsageError, match=r"functional_call gives 'blocks.0.up.weight' another value.*'memory' has packed"
        ):
            torch.func.functional_call(model, other, (x,))
        model(x)
    tries = Tries(model).eval()
    plain = tries(x)
    with (
        anytorch.mode("memory", device="cpu", **EXACT),
        torch.no_grad(),
        pytest.raises(UsageError, match="weights=None"),
    ):
        tries(x)
    with anytorch.mode("memory", device="cpu", weights=None, **EXACT), torch.no_grad():
        assert torch.equal(tries(x), plain)
    anytorch.quant.quantize(model, "int8")
    for value in (torch.zeros(128, 64), nn.Parameter(torch.zeros(128, 64))):
        with pytest.raises(UsageError, match="a packed layer's weight cannot be set"):
            torch.func.functional_call(model, {"blocks.0.up.weight": value}, (x,))
