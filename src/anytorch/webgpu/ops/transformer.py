"""The whole-layer ops torch's own transformer modules call in inference, made of the device's ops.

nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerEncoder take this "fast path" on any device written as
an extension, and there is no way to say no to it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

PADDING = 1  # mask_type of a mask (batch, keys); 0 is one of (queries, keys), 2 one of the scores' shape


def left_out(mask: torch.Tensor | None, mask_type: int | None) -> torch.Tensor | None:
    """The mask as a bool tensor that the scores (batch, heads, queries, keys) broadcast with; True is left out.

    A float mask is minus infinity there, as the CPU's kernel takes it.
    """
    if mask is None:
        return None
    mask = mask.to(torch.bool)
    return mask.view(mask.size(0), 1, 1, mask.size(1)) if mask_type == PADDING else mask


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
    q, k, v = (part.view(batch, length, num_head, -1).transpose(1, 2) for part in parts)  # batch, heads, length, size
    out_of = left_out(mask, mask_type)
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


def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type)[0]

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


def never_left_aligned(tensor: torch.Tensor, mask: torch.Tensor) -> bool:
    """May the padded batch become a nested tensor? This device has none; nn.TransformerEncoder goes on with the mask."""
    return False
