"""One generated row of a few windows by our own kernels (`models.kronos.kernels`): five per block instead of thirty.

They compute what `Cache.advance`, `Decoder.s2_logits` and `Sampler.draw` do, in float32 throughout, and work on the same
cache. `why_not` says where they cannot be used; the caller then takes torch's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from anytorch.engines.forecast.cache import Cache
from anytorch.engines.forecast.decoder import Decoder
from anytorch.engines.forecast.sampling import Sampler
from anytorch.models.kronos.fused import fuse
from anytorch.models.kronos.layers import EPS

MOST_ROWS = 64  # more rows make a step large enough for torch's kernels
SMALLEST_PRODUCT = 16  # rows and columns of a matrix unit's tile


def why_not(decoder: Decoder, rows: int) -> str:
    """Why this model's steps cannot go this way; "" if they can."""
    if rows > MOST_ROWS:
        return f"{rows} rows, and the kernels are for {MOST_ROWS}"
    if decoder.dtype != torch.float32:
        return f"the model is {decoder.dtype}"
    if not decoder.unpacked:
        return "the layers are quantized"
    if decoder.tables is None:
        return "the embeddings are not fused"
    if decoder.width % 64 or decoder.cross.head_width % SMALLEST_PRODUCT or decoder.head_width % 2:
        return f"a width of {decoder.width} does not fill the tiles"
    return "" if find_spec("triton") is not None else "triton is not installed"


@dataclass(frozen=True)
class Tiles:
    """How the work is cut. None of it changes what is computed beyond the order of sums.

    The values are the best of those measured on an H200 with Kronos-base (bench/results/forecast-h200-tiles.json).
    """

    dot: bool  # matrix units (three products of rounded parts: float32's accuracy), else plain multiplication
    precision: str = "tf32x3"
    block_n: int = 4
    block_k: int = 1024
    stages: int = 1
    warps: int = 4
    group: int = 1  # samples that read a prompt's keys together
    block: int = 64  # keys at a time
    splits: int = 1
    attend_warps: int = 4
    # Of the products back to the model's width, which have the fewest columns: block_k, stages, warps; None: as above.
    narrow: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, rows: int) -> Tiles:
        if rows == 1:
            return cls(dot=False, block=64, splits=8)
        if rows <= 8:
            return cls(dot=False, block_k=max(128, 1024 // power_of_two(rows)), stages=3, block=32, splits=8)
        return cls(dot=True, block_n=16, block_k=32, stages=6, warps=2, group=2, block=32, splits=8, narrow=(64, 4, 4))


class Layer:
    """The weights of one block as the kernels read them: views of the model's own."""

    def __init__(self, block: Any) -> None:
        attention, ffn = block.self_attn, block.ffn
        self.norm1, self.norm2 = block.norm1.weight.data, block.norm2.weight.data
        self.qkv, self.qkv_bias = fuse((attention.q_proj, attention.k_proj, attention.v_proj))
        self.out, self.out_bias = attention.out_proj.weight.data, attention.out_proj.bias.data
        self.gate, _ = fuse((ffn.w1, ffn.w3))
        self.down = ffn.w2.weight.data


class KernelStep:
    """The step of `StaticSteps`, on its tensors. `x` is the row to add; a call leaves the next one there."""

    def __init__(
        self,
        cache: Cache,
        sampler: Sampler,
        counters: Tensor,
        ids: tuple[Tensor, Tensor],
        future: Tensor,
        noise: tuple[Tensor, Tensor] | None,
        tiles: Tiles | None = None,
    ) -> None:
        self.kernels: Any = import_module("anytorch.models.kronos.kernels")
        self.cache, self.counters, self.ids, self.future, self.noise = cache, counters, ids, future, noise
        decoder = self.decoder = cache.decoder
        model = decoder.model
        self.rows = ids[0].shape[0]
        self.tiles = tiles or Tiles.of(self.rows)
        self.layers = [Layer(block) for block in model.transformer]
        kind: Any = {"device": decoder.device, "dtype": torch.float32}
        rows, width, heads = self.rows, decoder.width, decoder.cross.heads
        inner = self.layers[0].down.shape[1]
        self.x, self.y, self.last, self.attended = torch.empty(4, rows, width, **kind)
        self.qkv = torch.empty(rows, 3 * width, **kind)
        self.inner = torch.empty(rows, inner, **kind)
        self.logits = [torch.empty(rows, size, **kind) for size in decoder.sizes]
        self.chosen = torch.zeros(rows, dtype=torch.long, device=decoder.device)
        self.longest = cache.context.shape[1]
        self.scores = torch.empty(rows, heads, self.longest + cache.capacity, **kind)
        self.mixed = torch.empty(rows, heads, width, **kind)
        self.groups = len(cache.lengths) * -(-cache.samples // self.tiles.group)
        self.tile = power_of_two(decoder.head_width)
        states = self.tiles.splits * self.groups * self.tiles.group * decoder.heads
        self.part = torch.empty(states, self.tile, **kind)
        self.part_most, self.part_sum = torch.empty(2, states, **kind)
        self.arrived = torch.zeros(self.groups * decoder.heads, dtype=torch.int32, device=decoder.device)
        assert decoder.tables is not None
        self.tables = decoder.tables
        self.queries = query_table(decoder)
        self.filter = {"GREEDY": sampler.greedy, "BY_RANK": sampler.top_k > 0, "BY_SUM": sampler.top_p < 1}
        self.draw = (float(sampler.temperature), sampler.top_k, float(sampler.top_p))

    def start(self, s1: Tensor, s2: Tensor, time: Tensor) -> None:
        """The first row to add: its ids [rows] and the embedded time [rows, width]."""
        self.x.copy_(self.decoder.embed(s1, s2, time))

    def __call__(self) -> None:
        """Add the row in `x` at the counters' place, generate the next pair of ids, and look its row up."""
        model, decoder, cache = self.decoder.model, self.decoder, self.cache
        for place, layer in enumerate(self.layers):
            self.linear(self.x, layer.qkv, self.qkv, bias=layer.qkv_bias, norm=layer.norm1)
            self.attend(place)
            self.linear(self.attended, layer.out, self.y, bias=layer.out_bias, residual=self.x)
            self.linear(self.y, layer.gate, self.inner, norm=layer.norm2, gated=True)
            self.linear(self.inner, layer.down, self.x, residual=self.y)
        head, cross = model.head, model.dep_layer.cross_attn
        first, second = self.logits
        self.linear(self.x, head.proj_s1.weight, first, bias=head.proj_s1.bias, norm=decoder.norm)
        tile = power_of_two(decoder.width)
        noise_1, noise_2 = self.noise or (first, second)
        self.kernels.first_id[(self.rows,)](
            first, noise_1, self.x, decoder.norm, self.last, cache.own_context, self.chosen, self.ids[0],
            self.counters, self.rows, cache.capacity, self.ids[0].stride(0), *self.draw,
            WIDTH=decoder.width, TILE=tile, EPSILON=EPS, SIZE=decoder.sizes[0], **self.filter, num_warps=4,
        )  # fmt: skip
        self.ask()
        self.linear(self.mixed, cross.v_proj.weight, self.y, bias=cross.v_proj.bias, per_head=cross.head_width)
        self.linear(self.y, cross.out_proj.weight, self.attended, bias=cross.out_proj.bias, residual=self.last)
        self.linear(
            self.attended, head.proj_s2.weight, second, bias=head.proj_s2.bias, norm=model.dep_layer.norm.weight
        )
        self.kernels.second_id[(self.rows,)](
            second, noise_2, self.x, *self.tables, self.future, self.chosen, self.ids[1],
            self.counters, self.rows, cache.samples, self.future.shape[1], self.ids[1].stride(0), *self.draw,
            WIDTH=decoder.width, TILE=tile, SIZE=decoder.sizes[1], **self.filter, num_warps=4,
        )  # fmt: skip
        self.counters += 1

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        per_head: int = 0,
    ) -> None:
        tiles, rows, columns, width = self.tiles, x.shape[0], out.shape[1], weight.shape[1]
        block_n = tiles.block_n
        block_k, stages, warps = tiles.block_k, tiles.stages, tiles.warps
        if tiles.narrow is not None and residual is not None:
            block_k, stages, warps = tiles.narrow
        while per_head % block_n:  # a tile's columns belong to one head
            block_n //= 2
        block_m = power_of_two(rows)
        if tiles.dot:
            block_m = max(SMALLEST_PRODUCT, block_m)
        grid = (-(-columns // block_n), -(-rows // block_m))
        self.kernels.linear[grid](
            x, weight, absent(bias, x), absent(norm, x), absent(residual, x), out, rows, columns, x.stride(0),
            WIDTH=width, EPSILON=EPS, NORM=norm is not None, BIAS=bias is not None, RESIDUAL=residual is not None,
            GATED=gated, PER_HEAD=per_head, DOT=tiles.dot, PRECISION=tiles.precision,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=min(block_k, power_of_two(width)), STAGES=stages, num_warps=warps,
        )  # fmt: skip

    def attend(self, place: int) -> None:
        cache, decoder, tiles = self.cache, self.decoder, self.tiles
        cos, sin = cache.tables
        self.kernels.attend[(decoder.heads, self.groups, tiles.splits)](
            self.qkv, cos, sin, cos.stride(0), cos.stride(1) if cache.mixed else 0,
            cache.keys[place], cache.values[place], cache.own_keys[place], cache.own_values[place], self.attended,
            self.part, self.part_most, self.part_sum, self.arrived,
            self.counters, cache.lengths, cache.samples, self.longest, cache.capacity, cache.max_context,
            HEADS=decoder.heads, HEAD=decoder.head_width, TILE=self.tile, EVICT=cache.evict,
            GROUP=tiles.group, BLOCK=tiles.block, SPLITS=tiles.splits, num_warps=tiles.attend_warps,
        )  # fmt: skip

    def ask(self) -> None:
        """The second attention: the chosen s1 asks the context of the whole window."""
        cache, heads, width = self.cache, self.decoder.cross.heads, self.decoder.width
        block = 8
        blocks = -(-self.longest // block) + -(-cache.capacity // block)
        self.kernels.context_scores[(self.rows, blocks)](
            self.queries, self.chosen, cache.context, cache.own_context, self.scores, self.counters, cache.lengths,
            cache.samples, self.longest, cache.capacity, cache.max_context,
            HEADS=heads, WIDTH=width, EVICT=cache.evict, BLOCK=block, BLOCK_K=256, num_warps=4,
        )  # fmt: skip
        columns = 16  # few columns and many rows at a time: the rows come one after the other
        self.kernels.context_mix[(self.rows, -(-width // columns))](
            self.scores, cache.context, cache.own_context, self.mixed, self.counters,
            cache.samples, self.longest, cache.capacity,
            HEADS=heads, WIDTH=width, BLOCK=128, BLOCK_C=columns, num_warps=4,
        )  # fmt: skip


def query_table(decoder: Decoder) -> Tensor:
    """What each s1 asks the context, [ids, heads, width]: its query in the space of the context, scaled."""
    cross, model = decoder.cross, decoder.model
    embedded: Tensor = model.embedding.emb_s1.weight.data
    query = nn.functional.linear(embedded, cross.q_proj.weight.data, cross.q_proj.bias.data)
    by_head = query.view(len(query), cross.heads, -1).transpose(0, 1)
    asked = torch.bmm(by_head, decoder.k_weight).transpose(0, 1)
    return (asked * decoder.cross_scale).contiguous()


def absent(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor


def power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
