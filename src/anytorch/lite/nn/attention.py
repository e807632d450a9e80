"""Attention and the Transformer's encoder layer."""

from __future__ import annotations

import math

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.nn.layers import CustomLinear, LayerNorm, uniform
from anytorch.lite.nn.module import Module, Parameter
from anytorch.lite.tensors import CustomTensor


class MultiheadAttention(Module):
    """Self- or cross-attention with several heads; batch first: (B, L, E), (B, S, E) → (B, L, E)."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        if embed_dim % num_heads:
            raise UsageError(f"{embed_dim} cannot be divided among {num_heads} heads")
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.in_proj_weight = uniform(math.sqrt(6 / (4 * embed_dim)), 3 * embed_dim, embed_dim)
        self.in_proj_bias = Parameter(np.zeros(3 * embed_dim))
        self.out_proj = CustomLinear(embed_dim, embed_dim)

    def heads(self, x: CustomTensor) -> CustomTensor:
        """(B, L, E) → (B, heads, L, E / heads)"""
        b, length, e = x.shape
        return x.reshape(b, length, self.num_heads, e // self.num_heads).transpose(1, 2)

    def forward(
        self,
        query: CustomTensor,
        key: CustomTensor | None = None,
        value: CustomTensor | None = None,
        mask: CustomTensor | None = None,
        causal: bool = False,
    ) -> CustomTensor:
        e = self.embed_dim
        if query.ndim != 3 or query.shape[2] != e:
            raise UsageError(f"attention takes (batch, length, {e}), got {query.shape}")
        if key is None:  # self-attention: one product makes all three
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).split(e, dim=2)
        else:
            parts = zip((query, key, key if value is None else value), range(3), strict=True)
            q, k, v = (
                F.linear(x, self.in_proj_weight[i * e : (i + 1) * e], self.in_proj_bias[i * e : (i + 1) * e])
                for x, i in parts
            )
        out = F.scaled_dot_product_attention(self.heads(q), self.heads(k), self.heads(v), mask, causal)
        joined = out.transpose(1, 2).reshape(query.shape)  # (B, L, E)
        return F.dropout(self.out_proj(joined), self.dropout, self.training)


class TransformerEncoderLayer(Module):
    """Attention and a two-layer network, each added to what came in; batch first."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
    ) -> None:
        if activation not in ("relu", "gelu"):
            raise UsageError(f"unknown activation {activation!r}; known: 'relu', 'gelu'")
        self.self_attn = MultiheadAttention(d_model, nhead)
        self.linear1 = CustomLinear(d_model, dim_feedforward)
        self.linear2 = CustomLinear(dim_feedforward, d_model)
        self.norm1 = LayerNorm(d_model)
        self.norm2 = LayerNorm(d_model)
        self.dropout, self.norm_first = dropout, norm_first
        self.activation = activation

    def attend(self, x: CustomTensor, mask: CustomTensor | None, causal: bool) -> CustomTensor:
        return F.dropout(self.self_attn(x, mask=mask, causal=causal), self.dropout, self.training)

    def feed_forward(self, x: CustomTensor) -> CustomTensor:
        inner = (F.relu if self.activation == "relu" else F.gelu)(self.linear1(x))
        inner = F.dropout(inner, self.dropout, self.training)
        return F.dropout(self.linear2(inner), self.dropout, self.training)

    def forward(self, x: CustomTensor, mask: CustomTensor | None = None, causal: bool = False) -> CustomTensor:
        if self.norm_first:
            x = x + self.attend(self.norm1(x), mask, causal)
            return x + self.feed_forward(self.norm2(x))
        x = self.norm1(x + self.attend(x, mask, causal))
        return self.norm2(x + self.feed_forward(x))  # type: ignore[no-any-return]
