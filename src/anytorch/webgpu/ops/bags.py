"""embedding_bag: rows of a table, summed, averaged or their maximum taken per bag.

A bag's number of -1 takes an element (padding) out of every sum: a place out of range is not written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.ops.indexing import counted, selecting, total
from anytorch.webgpu.tensors import device

SUM, MEAN, MAX = 0, 1, 2
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Four:
    if indices.dim() != 1 or offsets.dim() != 1:
        raise RuntimeError("embedding_bag: indices and offsets must be vectors")
    bags, width = offsets.numel() - int(include_last_offset), weight.size(1)
    # Which bag each index is in: a mark where each bag begins, summed up.
    owner = counted(offsets[:bags], indices.numel()).cumsum(0, dtype=torch.int64) - 1
    places = owner if padding_idx < 0 else owner.masked_fill(indices.eq(padding_idx), -1)
    sizes = counted(places, bags)
    rows = weight.index_select(0, indices)
    named = torch.zeros(0, dtype=indices.dtype, device=device())
    if mode == MAX:
        wide = torch.full((bags, width), float("-inf"), dtype=torch.float32, device=device())
        selecting(wide, 0, places).combine(wide, rows, "amax")
        # The row that won, for the gradient; of equals the last.
        won = rows.float().eq(wide.index_select(0, owner))
        candidates = torch.where(won, indices.unsqueeze(1), -1).to(torch.int32)
        best = torch.full((bags, width), -1, dtype=torch.int32, device=device())
        selecting(best, 0, places).combine(best, candidates, "amax")
        named = best.to(indices.dtype)
        output = torch.where(sizes.eq(0).unsqueeze(1), 0.0, wide)
    else:
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(1)
        output = total((bags, width), places, rows)
        if mode == MEAN:
            output = output / sizes.clamp(min=1).unsqueeze(1)
    return output.to(weight.dtype), owner.to(indices.dtype), sizes.to(indices.dtype), named


def backward(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> torch.Tensor:
    if sparse:
        raise RuntimeError("embedding_bag: the webgpu device has no sparse gradients; use sparse=False")
    width = gradient.size(1)
    if mode == MAX:
        table = torch.zeros((num_weights, width), dtype=gradient.dtype, device=device())
        # An empty bag named no row: its gradient goes nowhere.
        kept = torch.where(maximum_indices.lt(0), 0.0, gradient).to(gradient.dtype)
        return table.scatter_add_(0, maximum_indices.clamp(min=0), kept)
    rows = gradient.index_select(0, offset2bag)
    if mode == MEAN:
        rows = rows / bag_size.index_select(0, offset2bag).clamp(min=1).unsqueeze(1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    if scale_grad_by_freq:
        rows = rows / counted(indices, num_weights).index_select(0, indices).unsqueeze(1)
    places = indices if padding_idx < 0 else indices.masked_fill(indices.eq(padding_idx), -1)
    return total((num_weights, width), places, rows.to(gradient.dtype)).to(gradient.dtype)


def weights_backward(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    share = (gradient.index_select(0, offset2bag) * weight.index_select(0, indices)).sum(1)
    return share if padding_idx < 0 else share.masked_fill(indices.eq(padding_idx), 0)


KERNELS: dict[str, Callable[..., Any]] = {
    "_embedding_bag": embedding_bag,
    "_embedding_bag_forward_only": embedding_bag,
    "_embedding_bag_backward": backward,
    "_embedding_bag_per_sample_weights_backward": weights_backward,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
