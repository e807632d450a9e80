# mypy: disable-error-code="no-any-return"
"""The building blocks that Kronos and its tokenizer share: norm, rotary positions, attention, gated feed-forward.

Names of parameters and of constructor arguments are the published ones, so that checkpoints load strictly and programs
that build from these blocks keep working.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch.errors import UsageError

EPS = 1e-5
ROTARY_BASE = 10000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the input's type, as published."""

    def __init__(self, dim: int, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


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

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(dim))

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Angles in float32 always: in bfloat16 positions above 256 would fall together.
        frequencies = self.inv_freq.float()
        cos, sin = rotary_tables(torch.arange(length, device=frequencies.device), frequencies)
        return cos.to(dtype), sin.to(dtype)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, heads, rows, head] turned by their positions; as many positions as there are queries."""
        cos, sin = self.tables(q.shape[-2], q.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin)


class Attention(nn.Module):
    """The four projections of an attention, and its heads."""

    def __init__(self, d_model: int, n_heads: int, attn_dropout_p: float = 0.0, resid_dropout_p: float = 0.0) -> None:
        super().__init__()
        self.heads = n_heads
        self.head_width = d_model // n_heads
        self.attn_dropout_p = attn_dropout_p
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.rotary = Rotary(self.head_width)
        self.resid_dropout = nn.Dropout(resid_dropout_p)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_width).transpose(1, 2)  # [batch, heads, rows, head]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        dropout = self.attn_dropout_p if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        out = out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)  # [batch, rows, width]
        return self.resid_dropout(self.out_proj(out))


class SelfAttention(Attention):
    """Causal attention of a window to itself."""

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        refuse_mask(key_padding_mask)
        q, k = self.rotary(self.split(self.q_proj(x)), self.split(self.k_proj(x)))
        return self.attend(q, k, self.split(self.v_proj(x)), causal=True)


class CrossAttention(Attention):
    """Attention of queries to the context.

    The published code builds the rotary table from the number of queries. With a single query, as in generation, that
    is position 0 for the query and, by broadcasting, for every key: no positions at all. Reproduced here. Where `causal`
    is not given, the module is causal in train mode alone, as published.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        causal: bool | None = None,
    ) -> Tensor:
        refuse_mask(key_padding_mask)
        q, k = self.split(self.q_proj(query)), self.split(self.k_proj(key))
        if query.shape[1] > 1:
            q, k = self.rotary(q, k)
        v = self.split(self.v_proj(key if value is None else value))
        return self.attend(q, k, v, causal=self.training if causal is None else causal)


class FeedForward(nn.Module):
    """w2(silu(w1 x) · w3 x), without biases."""

    def __init__(self, d_model: int, ff_dim: int, ffn_dropout_p: float = 0.0) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, ff_dim, bias=False)
        self.w3 = nn.Linear(d_model, ff_dim, bias=False)
        self.w2 = nn.Linear(ff_dim, d_model, bias=False)
        self.ffn_dropout = nn.Dropout(ffn_dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn_dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class TransformerBlock(nn.Module):
    """One pre-norm transformer block."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        ff_dim: int = 1024,
        ffn_dropout_p: float = 0.0,
        attn_dropout_p: float = 0.0,
        resid_dropout_p: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = RMSNorm(d_model)
        self.self_attn = SelfAttention(d_model, n_heads, attn_dropout_p, resid_dropout_p)
        self.norm2 = RMSNorm(d_model)
        self.ffn = FeedForward(d_model, ff_dim, ffn_dropout_p)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        refuse_mask(key_padding_mask)
        x = x + self.self_attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


def refuse_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise UsageError(
            "padding_mask is not supported: the published code gives it two opposite meanings, and nothing uses it",
            hint="give series of equal length, or use KronosPredictor.predict_batch, which takes any mix",
        )


def initialise_linear(module: nn.Module) -> None:
    """The published initialisation of linear layers and norms."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)
