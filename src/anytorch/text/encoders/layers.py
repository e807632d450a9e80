"""The encoder itself: token-wise layers over [tokens, width], and attention through a layout.

Nothing here knows whether tokens are packed end to end or padded to rectangles: `layouts` does, and it is asked for one
thing only, `attend`. So one module computes every family that `EncoderSpec` describes, either way, and every product is
a plain `nn.Linear` that `anytorch.quant.quantize` can replace. q, k and v are one product, and so are gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch.text.checkpoints.spec import EncoderSpec

if TYPE_CHECKING:
    from anytorch.text.encoders.layouts import Layout

Angles = tuple[Tensor, Tensor]  # cos and sin of every token's position, [tokens, 1, head_width / 2]


def make_norm(spec: EncoderSpec, names: Container[str], name: str, width: int) -> nn.Module:
    """The norm whose weights go by `name`; the identity where the checkpoint has none (ModernBERT's first one)."""
    if f"{name}.weight" not in names:
        return nn.Identity()
    if spec.rms_norm or f"{name}.weight".endswith(("q_norm.weight", "k_norm.weight")):
        return nn.RMSNorm(width, eps=spec.eps)
    return nn.LayerNorm(width, eps=spec.eps, bias=f"{name}.bias" in names)


GELU_TANH = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Any] = {"gelu": F.gelu, "gelu_tanh": GELU_TANH, "silu": F.silu, "relu": F.relu}


class Embedding(nn.Module):
    """Token vectors, plus position vectors where the family has them. Loading folds token type 0 into one of the two."""

    def __init__(self, spec: EncoderSpec, names: Container[str]) -> None:
        super().__init__()
        self.offset = spec.position_offset
        self.word = nn.Embedding(spec.vocabulary, spec.width)
        self.position: nn.Embedding | None = None
        if spec.learned_positions:
            self.position = nn.Embedding(spec.max_positions + spec.position_offset, spec.width)
        self.norm = make_norm(spec, names, "embed_norm", spec.width)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.word(ids)
        if self.position is not None:
            x = x + self.position(positions + self.offset if self.offset else positions)
        return self.norm(x)  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """cos and sin of every position, in float32: bfloat16 angles would blur the positions of long texts."""

    def __init__(self, head_width: int, theta: float, positions: int) -> None:
        super().__init__()
        self.head_width, self.theta, self.positions = head_width, theta, positions
        self.register_buffer("cosine", None, persistent=False)
        self.register_buffer("sine", None, persistent=False)
        self.cosine: Tensor
        self.sine: Tensor

    def fill(self, device: torch.device) -> None:
        """Compute the tables on the CPU, so that every device rotates by the same angles."""
        steps = torch.arange(0, self.head_width, 2, dtype=torch.float32, device="cpu") / self.head_width
        places = torch.arange(self.positions, dtype=torch.float32, device="cpu")
        angles = places[:, None] * (1.0 / self.theta**steps)  # [positions, head_width / 2]
        self.cosine, self.sine = angles.cos().to(device), angles.sin().to(device)

    def forward(self, positions: Tensor) -> Angles:
        """One gather per batch and theta, shared by the layers."""
        return F.embedding(positions, self.cosine)[:, None], F.embedding(positions, self.sine)[:, None]


def rotate(x: Tensor, angles: Angles) -> Tensor:
    cosine, sine = angles
    first, second = x.float().chunk(2, dim=-1)  # [tokens, heads, head_width / 2]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)


class RelativeBias(nn.Module):
    """A bias per head and bucket of distance: the near ones each have a bucket, the far ones share logarithmically."""

    def __init__(self, spec: EncoderSpec) -> None:
        super().__init__()
        self.furthest = spec.relative_distance
        self.table = nn.Embedding(spec.relative_buckets, spec.heads)

    def forward(self, length: int) -> Tensor:  # [heads, length, length]
        places = torch.arange(length, device=self.table.weight.device)
        behind = places[:, None] - places[None, :]  # query minus key
        half = self.table.num_embeddings // 2
        exact = half // 2
        distance = behind.abs()
        # The clamp keeps the logarithm of 0 out; those distances are taken from the exact half anyway.
        shares = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.furthest / exact)
        far = (exact + (shares * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(distance < exact, distance, far) + (behind < 0).long() * half
        return self.table(bucket).permute(2, 0, 1).contiguous()  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self, spec: EncoderSpec, names: Container[str], layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = spec.heads, spec.kv_heads, spec.head_width
        self.window, self.causal = spec.window(layer), spec.causal
        mine = f"layers.{layer}"
        products = (spec.heads + 2 * spec.kv_heads) * spec.head_width
        self.qkv = nn.Linear(spec.width, products, bias=f"{mine}.q.bias" in names)
        self.out = nn.Linear(spec.heads * spec.head_width, spec.width, bias=f"{mine}.o.bias" in names)
        self.q_norm = make_norm(spec, names, f"{mine}.q_norm", spec.head_width)
        self.k_norm = make_norm(spec, names, f"{mine}.k_norm", spec.head_width)

    def forward(self, x: Tensor, layout: Layout, angles: Angles | None, bias: Tensor | None) -> Tensor:
        qkv = self.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_width)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # [tokens, heads, head_width]
        q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        mixed = layout.attend(q, k, v, window=self.window, causal=self.causal, bias=bias)
        return self.out(mixed.reshape(-1, self.heads * self.head_width))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, spec: EncoderSpec, names: Container[str], layer: int) -> None:
        super().__init__()
        mine = f"layers.{layer}"
        self.gated, self.activation = spec.gated, spec.activation
        self.up = nn.Linear(spec.width, spec.inner * (2 if spec.gated else 1), bias=f"{mine}.up.bias" in names)
        self.down = nn.Linear(spec.inner, spec.width, bias=f"{mine}.down.bias" in names)
        self.fused = False  # GELU by tanh inside the product: no pass over the widest tensor; `strategy` tries it

    def can_fuse(self) -> bool:
        plain = type(self.up) is nn.Linear and self.up.bias is not None  # not one that has been quantized
        return plain and not self.gated and self.activation in ("gelu", "gelu_tanh")

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            # aten::_addmm_activation(self, mat1, mat2, *, beta, alpha, use_gelu): cuBLAS's own epilogue where there is one
            return self.down(torch._addmm_activation(self.up.bias, x, self.up.weight.t(), use_gelu=True))  # type: ignore[no-any-return]
        x = self.up(x)
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            x = ACTIVATIONS[self.activation](gate) * value
        else:
            x = ACTIVATIONS[self.activation](x)
        return self.down(x)  # type: ignore[no-any-return]


AddNorm = Callable[[Tensor, Tensor, nn.Module], Tensor]


def plain_add_norm(x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
    return norm(x + y)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, spec: EncoderSpec, names: Container[str], layer: int) -> None:
        super().__init__()
        self.pre_norm = spec.pre_norm
        self.attention = Attention(spec, names, layer)
        self.feed_forward = FeedForward(spec, names, layer)
        self.attention_norm = make_norm(spec, names, f"layers.{layer}.attn_norm", spec.width)
        self.feed_forward_norm = make_norm(spec, names, f"layers.{layer}.mlp_norm", spec.width)
        self.add_norm: AddNorm = plain_add_norm

    def forward(self, x: Tensor, layout: Layout, angles: Angles | None, bias: Tensor | None) -> Tensor:
        if self.pre_norm:
            x = x + self.attention(self.attention_norm(x), layout, angles, bias)
            return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]
        x = self.add_norm(x, self.attention(x, layout, angles, bias), self.attention_norm)
        return self.add_norm(x, self.feed_forward(x), self.feed_forward_norm)


class EncoderModule(nn.Module):
    """ids [tokens] in a layout → the last layer's states [tokens, width].

    `names` are the tensors the checkpoint has, under the names of `checkpoints.weights`: a bias or a norm that is not
    among them is left out of the module too.
    """

    def __init__(self, spec: EncoderSpec, names: Container[str]) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Embedding(spec, names)
        self._layers = [Layer(spec, names, index) for index in range(spec.layers)]
        self.layers = nn.ModuleList(self._layers)
        self.final_norm = make_norm(spec, names, "final_norm", spec.width)
        self.relative = RelativeBias(spec) if spec.relative_buckets else None
        # ModernBERT rotates its local and its global layers by two different thetas: one table for each.
        thetas = sorted(set(spec.rotary_thetas))
        self.rotaries = nn.ModuleList(Rotary(spec.head_width, theta, spec.max_positions) for theta in thetas)
        self.rotary_of = tuple(thetas.index(theta) for theta in spec.rotary_thetas)

    def can_fuse(self) -> bool:
        return all(layer.feed_forward.can_fuse() for layer in self._layers)

    def fuse(self, fused: bool) -> None:
        for layer in self._layers:
            layer.feed_forward.fused = fused

    def use_add_norm(self, function: AddNorm | None) -> None:
        """Compute the sum and the norm behind it by this function: only of LayerNorms behind a half (post-norm)."""
        for layer in self._layers:
            layer.add_norm = function or plain_add_norm

    def forward(self, ids: Tensor, layout: Layout) -> Tensor:
        x = self.embedding(ids, layout.positions)
        angles: list[Angles] = [rotary(layout.positions) for rotary in self.rotaries]
        bias = self.relative(layout.longest) if self.relative is not None else None
        for index, layer in enumerate(self.layers):
            x = layer(x, layout, angles[self.rotary_of[index]] if angles else None, bias)
        return self.final_norm(x)  # type: ignore[no-any-return]
