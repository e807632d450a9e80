"""Ops whose result depends on how many elements are set, counting, and sums by place: nonzero, masked_*, bincount, the
gradients of embeddings, embedding_bag.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anytorch.webgpu.dtypes import spoken
from anytorch.webgpu.indexed import positions
from anytorch.webgpu.kernels import into, register_kernels
from anytorch.webgpu.launch import NoKernel
from anytorch.webgpu.ops.indexing import (
    INDEX_DTYPES,
    check_index,
    combinable,
    constant,
    counted,
    index_tensor,
    ours,
    selecting,
    take,
    total,
)
from anytorch.webgpu.tensors import aten, device, new_contiguous


def nonzero(source: torch.Tensor) -> torch.Tensor:
    return positions(source if source.dtype is torch.bool else source.ne(0))


def masked_select(source: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    op = aten.masked_select.default
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, got {mask.dtype}")
    shape = torch.broadcast_shapes(source.shape, mask.shape)
    if not shape:
        return index_tensor(ours(op, source).reshape(1), [ours(op, mask).reshape(1)])
    return index_tensor(ours(op, source).expand(shape), [ours(op, mask).expand(shape)])


def masked_scatter(target: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Element k of the source goes to the k-th place that is set: a running count says which k each place has."""
    if mask.dtype is not torch.bool:
        raise RuntimeError(f"masked_scatter_ only supports boolean masks, but got mask with dtype {mask.dtype}")
    if target.dtype is not source.dtype:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes but got {target.dtype} and {source.dtype}"
        )
    if target.numel() == 0:
        return target
    whole = mask.expand(target.shape)
    flat = whole.reshape(-1)
    if source.numel() == 0:
        if bool(flat.any()):
            raise RuntimeError(
                "masked_scatter: expected self and source to have as many elements as there are ones in mask"
            )
        return target
    order = flat.to(torch.int32).cumsum(0, dtype=torch.int32) - 1
    chosen = take(source, order.clamp_(min=0)).reshape(target.shape)
    return target.copy_(torch.where(whole, chosen, target))


# --- embedding, counting ---------------------------------------------------------------------------------------------


def embedding_dense_backward(
    gradient: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    op = aten.embedding_dense_backward.default
    check_index(op, indices)
    if not combinable(gradient.dtype, "sum"):
        raise NoKernel
    width = gradient.size(-1)
    flat, rows = indices.reshape(-1), gradient.reshape(-1, width)
    if padding_idx >= 0:
        flat = flat.masked_fill(flat.eq(padding_idx), -1)  # writes nothing
    if scale_grad_by_freq and flat.numel():
        rows = rows / counted(flat, num_weights).index_select(0, flat.clamp(min=0)).clamp_(min=1).unsqueeze(1)
    return total((num_weights, width), flat, rows.to(gradient.dtype)).to(gradient.dtype)


def bincount(source: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    plain = weights is None or weights.dtype is torch.float32
    if source.dtype not in INDEX_DTYPES or source.dim() != 1 or not plain or minlength < 0 or source.numel() == 0:
        raise NoKernel
    if weights is not None and weights.shape != source.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    if int(source.amin().item()) < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(int(source.amax().item()) + 1, minlength)
    table = torch.zeros(size, dtype=torch.int64 if weights is None else torch.float32, device=device())
    values = constant(1, torch.int64) if weights is None else weights
    selecting(table, 0, source).combine(table, values, "sum")
    return table


def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """Which element each place of the result comes from: a mark where each run begins, summed up."""
    if repeats.dtype not in INDEX_DTYPES:
        raise RuntimeError("repeats has to be Long or Int tensor")
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.numel() == 0:
        return new_contiguous((0,), repeats.dtype)
    ends = repeats.cumsum(0)
    if output_size is None:  # the wait for the length brings the check along
        length, fewest = torch.stack((ends[-1], repeats.amin().to(ends.dtype))).tolist()
        if fewest < 0:
            raise RuntimeError("repeats can not be negative")
    else:
        length = output_size
    return counted(ends[:-1], length).cumsum(0).to(repeats.dtype)


# --- embedding_bag: rows of a table, summed, averaged or their maximum taken per bag ------------------------------------
#
# A bag's number of -1 takes an element (padding) out of every sum: a place out of range is not written.

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
    if indices.dim() not in (1, 2):
        raise RuntimeError(f"input has to be a 1D or 2D Tensor, but got Tensor of dimension {indices.dim()}")
    if offsets.dim() != 1:
        raise RuntimeError(f"offsets has to be a 1D Tensor, but got Tensor of dimension {offsets.dim()}")
    if weight.dim() != 2:
        raise RuntimeError(f"weight has to be a 2D Tensor, but got Tensor of dimension {weight.dim()}")
    if indices.dim() != 1:
        raise RuntimeError("embedding_bag: indices and offsets must be vectors")
    bags, width = offsets.numel() - int(include_last_offset), weight.size(1)
    # Which bag each index is in: a mark where each bag begins, summed up.
    owner = counted(offsets[:bags], indices.numel()).cumsum(0, dtype=torch.int64) - 1
    places = owner if padding_idx < 0 else owner.masked_fill(indices.eq(padding_idx), -1)
    sizes = counted(places, bags)
    told = "embedding_bag: Expected idx >= 0 && idx < num_embeddings"
    rows = selecting(weight, 0, indices).checked(told, weight).read(weight)
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


def embedding_bag_backward(
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


def nonzero_out(source: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    if out.dtype is not torch.int64:
        raise RuntimeError(
            f"nonzero: Expected out tensor to have scalar type Long but got scalar type {spoken(out.dtype)}"
        )
    return into(out, nonzero(source))


KERNELS: dict[str, Callable[..., Any]] = {
    "nonzero": nonzero,
    "nonzero.out": nonzero_out,
    "masked_select": masked_select,
    "masked_scatter_": masked_scatter,
    "embedding_dense_backward": embedding_dense_backward,
    "bincount": bincount,
    "repeat_interleave.Tensor": repeat_interleave,
    "_embedding_bag": embedding_bag,
    "_embedding_bag_forward_only": embedding_bag,
    "_embedding_bag_backward": embedding_bag_backward,
    "_embedding_bag_per_sample_weights_backward": weights_backward,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
