"""The models that `webgpu_gpu.py` times: plain torch, of any shape, with random weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    """The shape of MiniLM-L6: BERT with 6 layers of 384, 12 heads."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.places = nn.Embedding(512, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(hidden, 3 * hidden),
                    "out": nn.Linear(hidden, hidden),
                    "first": nn.LayerNorm(hidden),
                    "up": nn.Linear(hidden, 4 * hidden),
                    "down": nn.Linear(4 * hidden, hidden),
                    "second": nn.LayerNorm(hidden),
                }
            )
            for _ in range(layers)
        )
        self.heads = heads

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens) + self.places(places))
        batch, length, hidden = x.shape
        for layer in self.layers:
            qkv = layer["qkv"](x).view(batch, length, 3, self.heads, hidden // self.heads)
            q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, hidden)
            x = layer["first"](x + layer["out"](mixed))
            x = layer["second"](x + layer["down"](F.gelu(layer["up"](x))))
        return F.normalize(x.mean(1), dim=-1)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        self.side: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.side = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.side(x))


def resnet(blocks: tuple[int, ...], width: int) -> nn.Module:
    """ResNet-50 for (3, 4, 6, 3) and 64; with torchvision's own numbers of channels, so no download is needed."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = width
    for i, count in enumerate(blocks):
        for j in range(count):
            parts.append(Bottleneck(inside, width << i, 2 if i and not j else 1))
            inside = 4 * (width << i)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


class Residual(nn.Module):
    """Two convolutions of a U-Net's level; the time's vector is added between them."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, outside))
        self.second = nn.Sequential(nn.GroupNorm(32, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.side: nn.Module = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        return self.side(x) + self.second(y)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(context, width, bias=False)
        self.v = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        parts = (self.q(x), self.k(context), self.v(context))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Places(nn.Module):
    """Attention of an image's places to one another and to the prompt, and a gated layer."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself, self.prompt = Attention(width, width, heads), Attention(width, context, heads)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)  # [batch, places, width]
        normed = self.norms[0](y)
        y = y + self.itself(normed, normed)
        y = y + self.prompt(self.norms[1](y), context)
        left, right = self.gated(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(left * F.gelu(right))
        return x + self.leave(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Stable Diffusion 1.5's, of 859.5 million weights, for width 320 and levels (1, 2, 4, 4); attention but in the last."""

    def __init__(self, width: int, levels: tuple[int, ...], context: int, heads: int) -> None:
        super().__init__()
        self.width, time, last = width, 4 * width, len(levels) - 1
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, width, 3, padding=1)

        def block(inside: int, outside: int, level: int) -> nn.ModuleList:
            parts: list[nn.Module] = [Residual(inside, outside, time)]
            return nn.ModuleList(parts + ([Places(outside, context, heads)] if level < last else []))

        self.down = nn.ModuleList()
        kept, inside = [width], width
        for level, times in enumerate(levels):
            for _ in range(2):
                self.down.append(block(inside, times * width, level))
                inside = times * width
                kept.append(inside)
            if level < last:
                self.down.append(nn.ModuleList([nn.Conv2d(inside, inside, 3, 2, 1)]))
                kept.append(inside)
        self.middle = nn.ModuleList(
            [Residual(inside, inside, time), Places(inside, context, heads), Residual(inside, inside, time)]
        )
        self.up = nn.ModuleList()
        for level, times in reversed(list(enumerate(levels))):
            for i in range(3):
                parts = block(inside + kept.pop(), times * width, level)
                inside = times * width
                if level and i == 2:
                    parts.append(nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(inside, inside, 3, padding=1)))
                self.up.append(parts)
        self.last = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, x: torch.Tensor, step: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=x.device) * (-2 * 9.21034 / self.width))
        angles = step[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))

        def through(parts: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
            for part in parts:
                if isinstance(part, Residual):
                    x = part(x, time)
                else:
                    x = part(x, context) if isinstance(part, Places) else part(x)
            return x

        x = self.first(x)
        kept = [x]
        for parts in self.down:
            x = through(parts, x)
            kept.append(x)
        x = through(self.middle, x)
        for parts in self.up:
            x = through(parts, torch.cat([x, kept.pop()], 1))
        return self.last(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The shape of Qwen3-0.6B: one token at a time over a cache of fixed length, or whole texts without one."""

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
        self,
        tokens: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        cache: list[list[torch.Tensor]] | None = None,
        at: int = 0,
    ) -> torch.Tensor:
        batch, length = tokens.shape
        x = self.words(tokens)  # [batch, length, hidden]
        for i, layer in enumerate(self.layers):
            y = layer["first"](x)
            q = layer["q_norm"](layer["q"](y).view(batch, length, self.heads, self.d)).transpose(1, 2)
            k = layer["k_norm"](layer["k"](y).view(batch, length, self.key_heads, self.d)).transpose(1, 2)
            v = layer["v"](y).view(batch, length, self.key_heads, self.d).transpose(1, 2)
            q, k = (t * cosine + turned(t) * sine for t in (q, k))
            if cache is not None:
                keys, values = cache[i]
                keys[:, :, at : at + 1] = k
                values[:, :, at : at + 1] = v
                k, v = keys[:, :, : at + 1], values[:, :, : at + 1]
            y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
            x = x + layer["out"](y.transpose(1, 2).reshape(batch, length, -1))
            y = layer["second"](x)
            x = x + layer["down"](F.silu(layer["gate"](y)) * layer["up"](y))
        return F.linear(self.norm(x), self.words.weight)


def angles(first: int, length: int, d: int) -> torch.Tensor:
    """Rotary angles of places, [length, d]: of Qwen3's base."""
    places = torch.arange(first, first + length, dtype=torch.float32)
    return torch.outer(places, 1e6 ** (-torch.arange(0, d, 2) / d)).repeat(1, 2)


def turned(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)
