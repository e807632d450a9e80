"""Weights of several linear layers in one matrix, of which their own become views: one product in place of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def joined(layers: Sequence[nn.Linear], *, in_turns: bool = False) -> Tensor:
    """All rows in one matrix: one layer's after the other's, or row by row `in_turns`. Layers that lie so stay where they
    are: a decoder may have several kernels, one after the other."""
    weights = [layer.weight.detach() for layer in layers]
    first, width = weights[0], weights[0].shape[1]
    size, count = first.element_size(), len(weights)
    strides = (count * width if in_turns else width, 1)
    begins, begin = [], 0
    for weight in weights:
        begins.append(begin)
        begin += width if in_turns else weight.numel()
    if all(
        weight.stride() == strides and weight.data_ptr() == first.data_ptr() + at * size
        and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for weight, at in zip(weights, begins, strict=True)
    ):  # fmt: skip
        return first.as_strided((begin // width if not in_turns else count * len(first), width), (width, 1))
    whole = in_one(weights, in_turns=in_turns)
    views = whole.unflatten(0, (-1, count)).unbind(1) if in_turns else whole.split([len(w) for w in weights])
    for layer, view in zip(layers, views, strict=True):
        layer.weight.data = view
    return whole


def in_one(weights: Sequence[Tensor], *, in_turns: bool = False) -> Tensor:
    """Rows of several matrices in one: a copy, unless there is one only."""
    if len(weights) == 1:
        return weights[0]
    return torch.stack(list(weights), 1).flatten(0, 1) if in_turns else torch.cat(list(weights))


def joined_biases(layers: Sequence[nn.Linear], *, in_turns: bool = False) -> Tensor | None:
    """Their biases in the same order; None if they have none."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    if not biases:
        return None
    return torch.stack(biases, 1).flatten() if in_turns else torch.cat(biases)
