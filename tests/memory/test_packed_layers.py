"""Layers whose weights are packed codes, which are buffers, stream as others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import UsageError
from anytorch.memory.parked import ParkedBuffer
from anytorch.quant.linear import QuantLinear

pytestmark = pytest.mark.usefixtures("quant_builds")
LEVELS: dict[str, dict[str, Any]] = {
    "disk": {"device_budget": "300KB"},
    "host": {"device_budget": "300KB", "host_budget": "4MB"},
}


@pytest.fixture
def packed(models: Any) -> Any:
    """int4 layers without a bias have no parameter at all; the norms do."""
    torch.manual_seed(0)
    model = nn.Sequential(*[models.Layer(128) for _ in range(6)]).eval()
    for layer in model:
        layer.up.bias = None
        layer.up, layer.down = QuantLinear.of(layer.up, "int4"), QuantLinear.of(layer.down, "int8")
    return model


@pytest.mark.parametrize(("level", "blocks"), [("disk", "leaves"), ("host", None)])
def test_the_same_answers_from_where_they_rest(
    packed: Any, given: dict[str, Any], level: str, blocks: str | None
) -> None:
    x = torch.randn(3, 128)
    whole = sum(t.nbytes for t in packed.state_dict().values())
    state = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    with torch.no_grad():
        want = packed(x)
    buffers = [id(b) for b in packed.buffers()]
    anytorch.memory.fit(packed, "cpu", blocks=blocks, **given, **LEVELS[level])
    handle = anytorch.memory.fitted(packed)
    below = sum(handle.plan.nbytes_at(home) for home in ("host", "disk"))
    assert below > whole / 2 and handle.ledger.use("device").used <= handle.ledger.use("device").capacity
    with torch.no_grad():
        assert torch.equal(packed(x), want) and torch.equal(packed(x), want)
    streamed = [m for m in packed.modules() if isinstance(m, QuantLinear) and isinstance(m.codes, ParkedBuffer)]
    assert streamed and not any(layer._bound for layer in streamed), "a kernel holds on to codes that are gone"
    with pytest.raises(UsageError, match="on another memory level"):
        streamed[0].codes.sum()
    assert "Buffer of shape" in repr(streamed[0].codes)
    assert all(torch.equal(tensor, state[name]) for name, tensor in packed.state_dict().items())
    packed.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    packed.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(packed(x), want)
    anytorch.memory.unfit(packed)
    assert [id(b) for b in packed.buffers()] == buffers and not any(
        isinstance(b, ParkedBuffer) for b in packed.buffers()
    )
    with torch.no_grad():
        assert torch.equal(packed(x), want)


@pytest.mark.parametrize(("level", "blocks"), [("disk", "leaves"), ("host", None)])
def test_gradients_fetch_the_codes_again(packed: Any, given: dict[str, Any], level: str, blocks: str | None) -> None:
    x = torch.randn(3, 128, requires_grad=True)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(packed(x).square().sum(), x)[0]

    want = gradient()
    anytorch.memory.fit(packed, "cpu", blocks=blocks, **given, **LEVELS[level])
    handle = anytorch.memory.fitted(packed)
    assert torch.equal(gradient(), want)
    once = handle.stats()["fetched"]
    assert torch.equal(gradient(), want) and handle.stats()["fetched"] > once
    anytorch.memory.unfit(packed)
    assert torch.equal(gradient(), want)
