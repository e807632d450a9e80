"""From token states to one vector per text, on the device and in float32. Named as sentence-transformers names them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anytorch.errors import UsageError
from anytorch.text.encoders.layouts import Layout

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def check_pooling(pooling: str | Sequence[str]) -> tuple[str, ...]:
    names = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    for name in names:
        if name not in POOLINGS:
            raise UsageError(f"unknown pooling {name!r}; poolings: {', '.join(POOLINGS)}")
    if not names:
        raise UsageError(f"no pooling was named; poolings: {', '.join(POOLINGS)}")
    return names


def pool(x: Tensor, layout: Layout, poolings: Sequence[str]) -> Tensor:
    """x [tokens, width] → [rows, width × poolings] in float32. Rows that hold no text come out as anything."""
    vectors = [pool_one(x, layout, name) for name in poolings]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)


def pool_one(x: Tensor, layout: Layout, pooling: str) -> Tensor:
    if pooling == "cls":
        return x.index_select(0, layout.first.clamp(max=x.shape[0] - 1)).float()
    if pooling == "lasttoken":
        return x.index_select(0, (layout.first + layout.lengths - 1).clamp(min=0)).float()
    if pooling == "max":
        return layout.reduce(x, "max")
    lengths = layout.lengths.clamp(min=1)[:, None].float()
    if pooling == "weightedmean":  # a token counts as much as its place: the last ones of a decoder have seen the most
        summed = layout.reduce(x.float() * (layout.positions + 1)[:, None].float(), "sum")
        return summed / (lengths * (lengths + 1) / 2)
    summed = layout.reduce(x, "sum")
    return summed / (lengths if pooling == "mean" else lengths.sqrt())


def normalise(x: Tensor) -> Tensor:
    """Each row to length 1; a row of zeros stays one, as sentence-transformers has it."""
    return torch.nn.functional.normalize(x, dim=-1)
