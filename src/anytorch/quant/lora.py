"""Low-rank adapters on top of frozen layers: y = W·x + (alpha / rank)·B·A·x, where only A and B are trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

from anytorch import limits
from anytorch.errors import UsageError
from anytorch.quant.conv1d import QuantConv1D, as_conv1d, as_linear
from anytorch.quant.linear import QuantLinear
from anytorch.quant.model import Skip, _matches, replace_module, rules_of
from anytorch.quant.tensor import linear_of


class LoRALinear(nn.Module):
    """A frozen linear layer, packed or not, with an adapter. At the start it computes what the layer computes."""

    def __init__(
        self, base: nn.Linear | QuantLinear, rank: int, *, alpha: float | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        limits.RANK.check("rank", rank), limits.PART.check("dropout", dropout)
        if alpha is not None:
            limits.SCALE.check("alpha", alpha)
        if not 0 < rank <= min(base.in_features, base.out_features):
            raise UsageError(f"rank={rank}: the layer is {base.in_features} → {base.out_features}")
        self.base = base
        self.in_features, self.out_features = base.in_features, base.out_features
        self.rank, self.scaling = rank, (2.0 * rank if alpha is None else alpha) / rank
        self.dropout = nn.Dropout(dropout)
        dtype = base.dtype if isinstance(base, QuantLinear) else base.weight.dtype
        device = base.codes.device if isinstance(base, QuantLinear) else base.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, dtype=dtype, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        for parameter in base.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down = functional.linear(self.dropout(x), self.lora_a.to(x.dtype))
        out: torch.Tensor = self.base(x) + functional.linear(down, self.lora_b.to(x.dtype)) * self.scaling
        return out

    def merged(self) -> nn.Module:
        """One ordinary layer that computes the same."""
        plain = as_linear(self.base)
        linear = linear_of(plain.weight.detach() + (self.lora_b @ self.lora_a).detach() * self.scaling, plain.bias)
        return as_conv1d(linear) if isinstance(self.base, QuantConv1D) else linear


def add_lora(
    model: nn.Module,
    rank: int = 8,
    *,
    alpha: float | None = None,
    dropout: float = 0.0,
    skip: Skip | Iterable[Skip] = (),
    only: Skip | Iterable[Skip] = (),
) -> list[str]:
    """Put an adapter on every linear layer (packed or not), in place, and freeze everything else.

    `only` and `skip` take names, patterns or functions, as `quantize` does. Returns the adapted layers' names.
    """
    skips, onlys = rules_of(skip), rules_of(only)
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, LoRALinear))
    found = [
        name
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, QuantLinear))
        and not (inside and name.startswith(inside))
        and not any(_matches(rule, name, module) for rule in skips)
        and (not onlys or any(_matches(rule, name, module) for rule in onlys))
    ]
    if not found or found == [""]:
        raise UsageError("no linear layer to put an adapter on", hint="look at `only` and `skip`")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in found:
        layer = model.get_submodule(name)
        assert isinstance(layer, (nn.Linear, QuantLinear))
        replace_module(model, name, LoRALinear(layer, rank, alpha=alpha, dropout=dropout))
    return found


def lora_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The adapters' parameters, for an optimiser."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            yield module.lora_a
            yield module.lora_b


def merge_lora(model: nn.Module) -> int:
    """Replace adapted layers by ordinary ones that compute the same, in place; quantize again if that is wanted."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, LoRALinear)]
    for name, layer in found:
        replace_module(model, name, layer.merged())
    return len(found)
