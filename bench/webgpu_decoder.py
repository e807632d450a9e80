"""The decoder whose step `webgpu_gpu.py` times: plain torch, of any shape."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Decoder(nn.Module):
    """The shape of Qwen3-0.6B, one token at a time over a cache of fixed length."""

    def __init__(
        self, layers: int, hidden: int, heads: int, key_heads: int, d: int, inner: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.d = heads, key_heads, d
        self.words = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "first": nn.RMSNorm(hidden, eps=1e-6),
                    "q": nn.Linear(hidden, heads * d, bias=False),
                    "k": nn.Linear(hidden, key_heads * d, bias=False),
                    "v": nn.Linear(hidden, key_heads * d, bias=False),
                    "q_norm": nn.RMSNorm(d, eps=1e-6),
                    "k_norm": nn.RMSNorm(d, eps=1e-6),
                    "out": nn.Linear(heads * d, hidden, bias=False),
                    "second": nn.RMSNorm(hidden, eps=1e-6),
                    "gate": nn.Linear(hidden, inner, bias=False),
                    "up": nn.Linear(hidden, inner, bias=False),
                    "down": nn.Linear(inner, hidden, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=1e-6)

    def forward(
        self, token: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, cache: list[list[torch.Tensor]], at: int
    ) -> torch.Tensor:
        x = self.words(token)  # [1, 1, hidden]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            y = layer["first"](x)
            q = layer["q_norm"](layer["q"](y).view(1, 1, self.heads, self.d)).transpose(1, 2)
            k = layer["k_norm"](layer["k"](y).view(1, 1, self.key_heads, self.d)).transpose(1, 2)
            v = layer["v"](y).view(1, 1, self.key_heads, self.d).transpose(1, 2)
            q, k = (t * cosine + turned(t) * sine for t in (q, k))
            keys[:, :, at : at + 1] = k
            values[:, :, at : at + 1] = v
            past = slice(0, at + 1)
            y = F.scaled_dot_product_attention(q, keys[:, :, past], values[:, :, past], enable_gqa=True)
            x = x + layer["out"](y.transpose(1, 2).reshape(1, 1, -1))
            y = layer["second"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return F.linear(self.norm(x), self.words.weight)


def turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)
