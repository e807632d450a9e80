"""Small models for the tests of this folder."""

from __future__ import annotations

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + hidden


class Tied(nn.Module):
    """Everything that could go wrong at once: tied weights, a parameter of the root, buffers, an odd-sized bias."""

    def __init__(self, width: int = 128, layers: int = 6, words: int = 101) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.randn(width))
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.fail_after: int | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale + self.shift
        for number, layer in enumerate(self.layers):
            if number == self.fail_after:
                raise RuntimeError("in the middle of the model")
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def made(seed: int = 0, **options: int) -> Tied:
    torch.manual_seed(seed)
    return Tied(**options).eval()


IDS = torch.arange(10).view(2, 5)
