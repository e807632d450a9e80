"""The whole-layer ops torch's own transformer modules call in inference, and mixtures of experts, made of the device's ops.

nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerEncoder take this "fast path" on any device written as
an extension, and there is no way to say no to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PADDING = 1  # mask_type of a mask (batch, keys); 0 is one of (queries, keys), 2 one of the scores' shape


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not query.shape == key.shape == value.shape:
        raise RuntimeError("expected `query`/`key`/`value` shapes to match")
    batch, length, _ = query.shape
    if query is key is value:
        parts = F.linear(query, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
        parts = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    shape = (batch, length, num_head, embed_dim // num_head)  # in full: what has no elements does not tell one of them
    q, k, v = (part.view(shape).transpose(1, 2) for part in parts)  # batch, heads, length, size
    out_of = None if mask is None else mask.to(torch.bool)  # a float mask is minus infinity where a key is left out
    if out_of is not None and mask_type == PADDING:
        out_of = out_of.view(out_of.size(0), 1, 1, out_of.size(1))
    probabilities = None
    if need_weights:
        scores = q @ k.transpose(2, 3) * q.size(-1) ** -0.5
        if out_of is not None:
            scores = scores.masked_fill(out_of, -torch.inf)
        probabilities = scores.softmax(-1)
        mixed = probabilities @ v
        if average_attn_weights:
            probabilities = probabilities.mean(1)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, None if out_of is None else ~out_of)
    joined = mixed.transpose(1, 2).reshape(batch, length, embed_dim)
    return F.linear(joined, proj_weight, proj_bias), probabilities


def encoder_layer(src: torch.Tensor, embed_dim: int, num_heads: int, *rest: Any) -> torch.Tensor:
    """aten::_transformer_encoder_layer_fwd, with the rest of its arguments in its order."""
    qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps = rest[:7]
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, weight_1, bias_1, weight_2, bias_2 = rest[7:15]
    mask, mask_type = (*rest[15:], None, None)[:2]

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type)[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, weight_1, bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), weight_2, bias_2)

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        x = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)


def grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A product per group. A matrix holds the groups one after the other, `offs` are their ends; three dimensions hold one
    each. Waits for the device: the ends decide the sizes."""
    if bias is not None:
        raise RuntimeError("grouped gemm does not support bias yet")
    if first.dim() == second.dim() == 3:
        return torch.bmm(first, second).to(out_dtype or first.dtype)
    if offs is None:
        raise RuntimeError("Have to provide offsets if there is a 2d matrix")
    ends = [int(end) for end in offs.tolist()]
    groups = list(zip([0, *ends], ends, strict=False))
    rows, columns = first.shape[-2], second.shape[-1]
    size = (len(ends), rows, columns) if first.dim() == second.dim() == 2 else (rows, columns)
    result = torch.zeros(size, dtype=out_dtype or first.dtype, device=first.device)
    for i, (start, end) in enumerate(groups):
        if start == end:
            continue
        if first.dim() == second.dim() == 2:  # groups along the summed dimension
            result[i] = first[:, start:end] @ second[start:end]
        elif second.dim() == 3:  # of rows
            result[start:end] = first[start:end] @ second[i]
        else:  # of columns
            result[:, start:end] = first[i] @ second[:, start:end]
    return result
