"""Low-rank adaptation: the published weights stay as they are, and a small product of two matrices is learnt beside them.

y = W x + (scale / rank) · B A x, with B = 0 at the start, so that training starts from exactly the given model.
"""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch.errors import UsageError

M = TypeVar("M", bound=nn.Module)
TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "w1", "w2", "w3")


class LoraLinear(nn.Module):
    """A frozen linear layer and its learnt addition."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.factor = scale / rank
        self.down = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + F.linear(F.linear(x, self.down), self.up) * self.factor

    def merged(self) -> nn.Linear:
        """One plain layer that computes the same."""
        plain = copy.deepcopy(self.base)
        with torch.no_grad():
            plain.weight += (self.up @ self.down) * self.factor
        return plain


def add_lora(model: nn.Module, rank: int = 8, scale: float | None = None, targets: tuple[str, ...] = TARGETS) -> int:
    """Freeze the model and give every linear layer named in `targets` an addition of that rank, in place.

    Returns the number of parameters that will be trained. `scale` is 2 × rank unless given.
    """
    if rank < 1:
        raise UsageError(f"lora rank {rank}: use a whole number above 0")
    found = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, LoraLinear)
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name in targets
    ]
    if not found:
        raise UsageError(f"lora: the model has no linear layer named {', '.join(targets)}")
    model.requires_grad_(False)
    for parent, name, child in found:
        setattr(parent, name, LoraLinear(child, rank, 2.0 * rank if scale is None else scale))
    return sum(value.numel() for value in model.parameters() if value.requires_grad)


def merged(model: M) -> M:
    """A copy with every addition folded into its layer: the published layout again. The model itself is left alone."""
    made = copy.deepcopy(model)
    for parent in list(made.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                setattr(parent, name, child.merged())
    return made
