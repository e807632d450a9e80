"""The building blocks that Kronos and its tokenizer share: norm, rotary positions, attention, gated feed-forward.

Parameter names are those of the published checkpoints; a test loads such a checkpoint strictly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-5
ROTARY_BASE = 10000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the input's type, as published."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * self.weight


def inverse_frequencies(head_width: int) -> Tensor:
    """One frequency per pair of a head's values."""
    return 1.0 / (ROTARY_BASE ** (torch.arange(0, head_width, 2).float() / head_width))


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each [positions, head width]: the two halves of a head share their angles."""
    angles = positions.to(frequencies.dtype)[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (value i of the first half, value i of the second half) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Rotary(nn.Module):
    """Rotary positions 0 … length-1 of the window at hand. The frequencies are part of the published state dict."""

    inv_freq: Tensor

    def __init__(self, head_width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(head_width))

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Angles in float32 always: in bfloat16 positions above 256 would fall together.
        frequencies = self.inv_freq.float()
        cos, sin = rotary_tables(torch.arange(length, device=frequencies.device), frequencies)
        return cos.to(dtype), sin.to(dtype)


class Attention(nn.Module):
    """The four projections of an attention, and its heads."""

    def __init__(self, width: int, heads: int, attn_dropout_p: float = 0.0, resid_dropout_p: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.attn_dropout_p = attn_dropout_p
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)
        self.rotary = Rotary(self.head_width)
        self.resid_dropout = nn.Dropout(resid_dropout_p)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_width).transpose(1, 2)  # [batch, heads, rows, head]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        dropout = self.attn_dropout_p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        out = out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)  # [batch, rows, width]
        projected: Tensor = self.resid_dropout(self.out_proj(out))
        return projected


class SelfAttention(Attention):
    """Causal attention of a window to itself."""

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rotary.tables(x.shape[1], x.dtype)
        q = rotate(self.split(self.q_proj(x)), cos, sin)
        k = rotate(self.split(self.k_proj(x)), cos, sin)
        return self.attend(q, k, self.split(self.v_proj(x)), causal=True)


class CrossAttention(Attention):
    """Attention of queries to the context.

    The published code builds the rotary table from the number of queries. With a single query, as in generation, that
    is position 0 for the query and, by broadcasting, for every key: no positions at all. Reproduced here.
    """

    def forward(self, query: Tensor, context: Tensor, causal: bool) -> Tensor:
        q, k = self.split(self.q_proj(query)), self.split(self.k_proj(context))
        if query.shape[1] > 1:
            cos, sin = self.rotary.tables(query.shape[1], query.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.attend(q, k, self.split(self.v_proj(context)), causal=causal)


class FeedForward(nn.Module):
    """w2(silu(w1 x) · w3 x), without biases."""

    def __init__(self, width: int, inner: int, dropout_p: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.ffn_dropout = nn.Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ffn_dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))
        return out


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(
        self, width: int, heads: int, inner: int, ffn_dropout_p: float, attn_dropout_p: float, resid_dropout_p: float
    ) -> None:
        super().__init__()
        self.norm1 = RMSNorm(width)
        self.self_attn = SelfAttention(width, heads, attn_dropout_p, resid_dropout_p)
        self.norm2 = RMSNorm(width)
        self.ffn = FeedForward(width, inner, ffn_dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


def initialise_linear(module: nn.Module) -> None:
    """The published initialisation of linear layers and norms."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)
