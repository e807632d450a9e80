"""Elementwise ops, by theme: each is a table of the op's functional overload and the expression of one element of it."""

from __future__ import annotations

import torch

from anytorch.webgpu.ops import activation, arithmetic, comparison, creation, pointwise_losses


def register(library: torch.library.Library) -> None:
    for family in (arithmetic, comparison, activation, pointwise_losses, creation):
        family.register(library)
