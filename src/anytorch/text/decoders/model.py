"""Llama, Mistral, Qwen2 and Qwen3 as plain modules, with the names their checkpoints have.

They give the logits that transformers gives. What runs fast (`PersistentKernel`, recorded steps) takes its weights from
here and is compared with this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytorch import large_pages
from anytorch.errors import InputError
from anytorch.text.decoders.room import room_for
from anytorch.text.decoders.rotary import tables
from anytorch.text.decoders.spec import DecoderSpec

PORTION = 512  # tokens of a prompt that are read at once


class KeyValues:
    """Keys and values of up to `positions` tokens of `rows` texts: [layers, rows, kv_heads, positions, head_width] each.

    `length`: how many tokens of every row are in it. Raises OutOfMemory.
    """

    def __init__(
        self, spec: DecoderSpec, rows: int, positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        shape = (spec.layers, rows, spec.kv_heads, positions, spec.head_width)
        each = 2 * spec.layers * spec.kv_width * dtype.itemsize
        with room_for(rows * positions * each, rows, positions, torch.device(device), lambda nbytes: nbytes // each):
            self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            for kept in (self.keys, self.values):
                if kept.device.type == "cpu":
                    large_pages.ask(kept.data_ptr(), kept.nbytes)
                kept.zero_()
        self.length = 0

    @property
    def positions(self) -> int:
        return int(self.keys.shape[3])

    def of_row(self, row: int, length: int = 0) -> KeyValues:
        """The same memory, of one row that has so many tokens."""
        own = KeyValues.__new__(KeyValues)
        own.keys, own.values = self.keys[:, row : row + 1], self.values[:, row : row + 1]
        own.length = length
        return own

    def add(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; gives all that the layer has so far."""
        end = self.length + keys.shape[2]
        for kept, new in ((self.keys[layer], keys), (self.values[layer], values)):
            kept[:, :, self.length : end] = new
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, n, head_width] turned by angles of [n, head_width / 2]: the halves of a head are the pairs."""
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec, window: int) -> None:
        super().__init__()
        self.spec, self.window = spec, window
        self.q_proj = nn.Linear(spec.width, spec.q_width, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.width, spec.kv_width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.width, spec.kv_width, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.q_width, spec.width, bias=spec.out_bias)
        if spec.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(spec.head_width, spec.norm_eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, kept: KeyValues | None) -> Tensor:
        rows, n, _ = x.shape
        spec = self.spec
        q, k, v = self.projected(x)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if kept is not None:
            k, v = kept.add(layer, k, v)
        mask = self._mask(n, k.shape[2], x.device)
        whole = mask is None and n > 1
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=whole, enable_gqa=spec.heads != spec.kv_heads)
        made: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, n, spec.q_width))
        return made

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed where the family does that, not turned yet: [rows, heads, n, head_width] each."""
        rows, n, _ = x.shape
        spec = self.spec
        q = self.q_proj(x).view(rows, n, spec.heads, spec.head_width)
        k = self.k_proj(x).view(rows, n, spec.kv_heads, spec.head_width)
        v = self.v_proj(x).view(rows, n, spec.kv_heads, spec.head_width)
        if spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _mask(self, n: int, total: int, device: torch.device) -> Tensor | None:
        """Which of all positions each of the last n sees; None for all before it."""
        windowed = 0 < self.window < total
        if not windowed and n in (1, total):
            return None
        own = torch.arange(total - n, total, device=device)[:, None]
        every = torch.arange(total, device=device)
        seen = every <= own
        return seen & (every > own - self.window) if windowed else seen


class FeedForward(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(spec.width, spec.inner, bias=spec.mlp_bias) for _ in range(2))
        self.down_proj = nn.Linear(spec.inner, spec.width, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Layer(nn.Module):
    def __init__(self, spec: DecoderSpec, window: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(spec, window), FeedForward(spec)
        self.input_layernorm = RMSNorm(spec.width, spec.norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.width, spec.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, kept: KeyValues | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, layer, kept)
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Body(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.vocabulary, spec.width)
        self.layers = nn.ModuleList(Layer(spec, window) for window in spec.windows)
        self.norm = RMSNorm(spec.width, spec.norm_eps)


class Decoder(nn.Module):
    """Token ids in, logits out.

    decoder = anytorch.load_decoder("./Qwen3-0.6B")
    logits = decoder(ids)                                   # [rows, n, vocabulary]
    kept = decoder.new_cache(rows=1, positions=512)
    logits = decoder(ids, kept)[:, -1]                      # ids that follow what `kept` has
    """

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = Body(spec)
        self.lm_head = nn.Linear(spec.width, spec.vocabulary, bias=False)
        if spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._turns: tuple[Tensor, Tensor] | None = None  # cosines and sines of the positions so far

    def new_cache(self, rows: int = 1, positions: int | None = None) -> KeyValues:
        """Room for the keys and values of so many tokens; left out: all that the model was made for."""
        weight = self.model.embed_tokens.weight
        return KeyValues(self.spec, rows, positions or self.spec.max_positions, weight.dtype, weight.device)

    def get_output_embeddings(self) -> nn.Linear:
        """The head, by the name that language models of transformers have it under."""
        return self.lm_head

    def forward(
        self, ids: Tensor | Sequence[Sequence[int]], kept: KeyValues | None = None, *, last: bool = False
    ) -> Tensor:
        """Logits of every given token, or of the `last` one alone, [rows, n or 1, vocabulary]. With `kept` the tokens follow
        those in it, and their keys and values stay there.

        Raises InputError for invalid tokens, and for more than there is room for.
        """
        device = self.model.embed_tokens.weight.device
        ids = torch.as_tensor(ids, device=device)
        begin = 0 if kept is None else kept.length
        end = begin + ids.shape[-1]
        room = self.spec.max_positions if kept is None else min(kept.positions, self.spec.max_positions)
        if ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
            raise InputError(f"token ids are {ids.dtype} of shape {list(ids.shape)}; pass whole numbers [rows, n]")
        if end > room:
            raise InputError(f"{end} tokens do not fit: there is room for {room}")
        x = self.model.embed_tokens(ids)
        cos, sin = (one[begin:end].to(x.dtype) for one in self._angles(end, device))
        for number, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, number, kept)
        if kept is not None:
            kept.length = end
        made: Tensor = self.lm_head(self.model.norm(x[:, -1:] if last else x))
        return made

    def read(self, ids: Sequence[int], kept: KeyValues) -> Tensor:
        """Logits of a prompt's last token, [vocabulary]; its keys and values stay in `kept`. A portion at a time: the scores
        of all tokens for all tokens would take memory that grows with the square of the prompt."""
        portions = [list(ids[begin : begin + PORTION]) for begin in range(0, len(ids), PORTION)]
        made: list[Tensor] = [self([portion], kept, last=True)[0, -1] for portion in portions]
        return made[-1]

    def _angles(self, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._turns is None or self._turns[0].shape[0] < positions or self._turns[0].device != device:
            most = min(self.spec.max_positions, max(positions, 1024))
            self._turns = tables(self.spec, max(most, positions), device)
        return self._turns
