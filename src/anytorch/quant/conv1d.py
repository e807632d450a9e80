"""`transformers`' Conv1D, which GPT-2 is made of: a linear layer whose weight lies transposed, [in, out].

It is packed by way of the linear layer that computes the same, and given back as what it was. `transformers` is never
imported here: a model that has such a layer has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from anytorch.quant.linear import QuantLinear
from anytorch.quant.tensor import linear_of


def conv1d() -> type[nn.Module] | None:
    """The class, if it was imported."""
    kind: type[nn.Module] | None = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return kind


def is_conv1d(layer: object) -> bool:
    """Exactly that class: subclasses have a meaning of their own."""
    return (kind := conv1d()) is not None and type(layer) is kind


def is_packable(layer: object) -> bool:
    return type(layer) is nn.Linear or is_conv1d(layer)


def matrix_of(layer: nn.Module) -> torch.Tensor:
    """The weight of a layer that can be packed, as [out, in]: of a Conv1D it is a view of its own."""
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return weight.T if is_conv1d(layer) else weight


def as_linear(layer: nn.Module) -> nn.Linear:
    """The linear layer that computes the same, packed or not; an ordinary one is itself, and a bias the same object."""
    if isinstance(layer, nn.Linear):
        return layer
    bias: Any = layer.bias
    if isinstance(layer, QuantLinear):
        return linear_of(layer.matrix, bias, training=layer.training)
    return linear_of(matrix_of(layer).detach().contiguous(), bias, training=layer.training)


def ordinary(layer: QuantLinear) -> nn.Module:
    """What a packed layer stands for, with the rounded weight."""
    linear = as_linear(layer)
    return as_conv1d(linear) if isinstance(layer, QuantConv1D) else linear


def as_conv1d(linear: nn.Linear) -> nn.Module:
    kind = conv1d()
    assert kind is not None
    with torch.device("meta"):
        layer = kind(linear.out_features, linear.in_features)
    layer.weight = nn.Parameter(linear.weight.detach().T.contiguous(), linear.weight.requires_grad)
    assert linear.bias is not None  # Conv1D always has one
    layer.bias = linear.bias
    return layer.train(linear.training)


class QuantConv1D(QuantLinear):
    """Takes the place of a Conv1D; its `weight` is [in, out], as there."""

    @property
    def weight(self) -> torch.Tensor:
        return self.matrix.T

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        QuantLinear.weight.fset(self, value)  # type: ignore[attr-defined]


def kind_for(layer: nn.Module) -> type[QuantLinear]:
    """The packed layer to put in the place of this one."""
    return QuantConv1D if is_conv1d(layer) or isinstance(layer, QuantConv1D) else QuantLinear
