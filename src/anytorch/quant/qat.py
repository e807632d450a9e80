"""Training with rounding in the loop: the forward pass sees the rounded weight, the backward pass pretends it did not.

`prepare_qat(model, "int4")`, train as usual, `convert(model)`: what was trained against is exactly what is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anytorch.quant.choose import Prefer
from anytorch.quant.formats import Format, parse
from anytorch.quant.linear import QuantLinear
from anytorch.quant.model import Skip, linear_targets, replace_module
from anytorch.quant.rounding import decode, encode
from anytorch.quant.tensor import into_groups, linear_of


class _Round(torch.autograd.Function):
    """Values in, rounded values out; gradients pass straight through."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounding: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounding(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The scales span each group, so nothing is clipped beyond half a step: the estimate has no dead zones.
        return gradients[0], None


def fake_quantize(weight: torch.Tensor, format: str | Format) -> torch.Tensor:
    """The weight as it would be after packing, with gradients that reach the unrounded one (straight-through)."""
    chosen = parse(format)

    def rounding(weight: torch.Tensor) -> torch.Tensor:
        rounded = decode(encode(into_groups(weight, chosen), chosen), chosen)
        return rounded.reshape(weight.shape[0], -1)[:, : weight.shape[1]].to(weight.dtype)

    rounded: torch.Tensor = _Round.apply(weight, rounding)
    return rounded


def _round_inputs(x: torch.Tensor) -> torch.Tensor:
    """Inputs rounded to int8 with one scale per row, as dynamic int8 does."""
    step = (x.abs().amax(dim=-1, keepdim=True) / 127).clamp(min=1e-30)
    return (x / step).round() * step


class QatLinear(nn.Linear):
    """A linear layer that computes with its rounded weight and trains the unrounded one."""

    format: Format

    @classmethod
    def of(cls, linear: nn.Linear, format: Format) -> QatLinear:
        layer = linear_of(linear.weight, linear.bias, training=linear.training, kind=cls)
        assert isinstance(layer, cls)
        layer.format = format
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.format.activations == "int8":
            x = _Round.apply(x, _round_inputs)
        return functional.linear(x, fake_quantize(self.weight, self.format), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.format}"


def prepare_qat(
    model: nn.Module, format: str | Format, *, skip: Skip | Iterable[Skip] = (), group_size: int | None = None
) -> list[str]:
    """Replace linear layers by ones that round in the forward pass, in place; their parameters stay the same objects, so
    an optimiser that holds them goes on working. Returns the layers' names."""
    chosen = parse(format, group_size)
    layers, _ = linear_targets(model, skip)
    for name, linear in layers.items():
        replace_module(model, name, QatLinear.of(linear, chosen))
    return list(layers)


def convert(model: nn.Module, *, prefer: Prefer = "memory") -> list[str]:
    """Pack the layers that `prepare_qat` made, in place: the model computes what it was trained to compute."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, QatLinear)]
    for name, layer in found:
        replace_module(model, name, QuantLinear.of(layer, layer.format, prefer=prefer))
    return [name for name, _ in found]
