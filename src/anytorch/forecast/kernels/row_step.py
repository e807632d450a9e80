"""One generated row of a few windows by our own kernels (`row_step_source`): five per block instead of thirty.

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

from anytorch.forecast.decoding.decoder import Cache, Decoder
from anytorch.forecast.decoding.sampling import Sampler
from anytorch.forecast.kernels import attention
from anytorch.forecast.kernels.attention import RowAttention, Share
from anytorch.forecast.kernels.choice import Chooser
from anytorch.forecast.kernels.products import (
    FEW_ROWS,
    MOST_ROWS,
    SMALLEST_PRODUCT,
    Cut,
    KernelLaunch,
    Layer,
    Product,
    Products,
    Way,
    Work,
    divided,
    power_of_two,
    take,
)
from anytorch.forecast.model.layers import EPS
from anytorch.measured.verdict import Verdict

# Largest difference of a row's context (whose values are about 1) and logits between two ways of computing in float32.
SAME_VALUES = 1e-3


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
    """How the work is cut where nothing was measured. None of it changes what is computed beyond the order of sums.

    The values are the best of those measured on an H200 with Kronos-base (bench/results/forecast-h200-sweep.json).
    """

    dot: bool  # matrix units (three products of rounded parts: float32's accuracy), else plain multiplication
    precision: str = "tf32x3"
    block_n: int = 2
    block_k: int = 1024
    stages: int = 1
    warps: int = 1
    group: int = 0  # samples that read a prompt's keys together; 0: all of them, on the matrix units
    block: int = 64  # keys at a time
    splits: int = 8
    attend_warps: int = 4
    # Of the products back to the model's width, which have the fewest columns: block_k, stages, warps; None: as above.
    narrow: tuple[int, int, int] | None = None
    parts: int = 1  # of a product's sum; 0: as many as keep the device busy

    @classmethod
    def of(cls, rows: int) -> Tiles:
        if rows == 1:
            return cls(dot=False)
        if rows <= FEW_ROWS:
            block_k = max(128, 1024 // power_of_two(rows))
            return cls(dot=False, block_n=4, block_k=block_k, stages=3, warps=2, narrow=(2 * block_k, 3, 2))
        return cls(dot=True, block_n=16, block_k=16, stages=8, warps=2, narrow=(32, 4, 2), parts=0)

    def cut(self, product: Product) -> Cut:
        block_k, stages, warps = self.block_k, self.stages, self.warps
        if self.narrow is not None and product.residual:
            block_k, stages, warps = self.narrow
        cut = Cut(self.block_n, block_k, stages, warps, self.parts or 1, dot=self.dot, precision=self.precision)
        return cut if self.parts else divided(product, cut)

    def share(self, samples: int) -> Share:
        """One sample would be one row of a matrix unit's sixteen: it is more and smaller programs instead."""
        if samples == 1:
            return Share(2 * self.splits, max(1, self.block // 2), 1)
        return Share(self.splits, self.block, self.attend_warps, self.group)


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
        self.kernels: Any = import_module("anytorch.forecast.kernels.row_step_source")
        self.cache, self.counters, self.ids, self.future, self.noise = cache, counters, ids, future, noise
        decoder = self.decoder = cache.decoder
        self.rows = ids[0].shape[0]
        tiles = tiles or Tiles.of(self.rows)
        layers = [Layer(block) for block in decoder.model.transformer]
        kind: Any = {"device": decoder.device, "dtype": torch.float32}
        rows, width, heads = self.rows, decoder.width, decoder.cross.heads
        self.x, self.y, self.last, self.attended = torch.empty(4, rows, width, **kind)
        self.qkv = torch.empty(rows, 3 * width, **kind)
        self.inner = torch.empty(rows, layers[0].down.shape[1], **kind)
        self.logits = [torch.empty(rows, size, **kind) for size in decoder.sizes]
        self.chosen = torch.zeros(rows, dtype=torch.long, device=decoder.device)
        self.longest = cache.context.shape[1]
        self.scores = torch.empty(rows, heads, self.longest + cache.capacity, **kind)
        self.mixed = torch.empty(rows, heads * width, **kind)
        self.products = Products(decoder.device, tiles.cut)
        self.attend = RowAttention(cache, counters, self.qkv, self.attended, tiles.share(cache.samples))
        self.built_in = self.attend.share
        self.blocks = [self.block_works(layer) for layer in layers]
        self.head_works = self.works_behind()
        self.choices: dict[str, Verdict] = {}
        assert decoder.tables is not None
        self.tables = decoder.tables
        self.queries = query_table(decoder)
        self.filter = {"GREEDY": sampler.greedy, "BY_RANK": sampler.top_k > 0, "BY_SUM": sampler.top_p < 1}
        self.draw = (float(sampler.temperature), sampler.top_k, float(sampler.top_p))

    def block_works(self, layer: Layer) -> tuple[Work, Work, Work, Work]:
        """A block's products: q, k and v; back from the attention; gate and value; back from them."""
        return (
            Work(self.x, layer.qkv, self.qkv, bias=layer.qkv_bias, norm=layer.norm1),
            Work(self.attended, layer.out, self.y, bias=layer.out_bias, residual=self.x),
            Work(self.y, layer.gate, self.inner, norm=layer.norm2, gated=True),
            Work(self.inner, layer.down, self.x, residual=self.y),
        )

    def works_behind(self) -> tuple[Work, Work, Work, Work]:
        """The products behind the blocks: s1's logits; the second attention's values and way back; s2's logits."""
        model, cross = self.decoder.model, self.decoder.cross
        first, second, knowing = model.head.proj_s1, model.head.proj_s2, model.dep_layer.norm.weight.data
        values, out = cross.v_proj, cross.out_proj
        return (
            Work(self.x, first.weight.data, self.logits[0], bias=first.bias.data, norm=self.decoder.norm),
            Work(self.mixed, values.weight.data, self.y, bias=values.bias.data, per_head=cross.head_width),
            Work(self.y, out.weight.data, self.attended, bias=out.bias.data, residual=self.last),
            Work(self.attended, second.weight.data, self.logits[1], bias=second.bias.data, norm=knowing),
        )

    # --- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, chooser: Chooser) -> bool:
        """Take for every product and for the attention what is remembered or measures best. The rows so far are lost.

        False while kernels are being compiled: ask again when the chooser is ready.
        """
        works = [work for block in self.blocks for work in block] + list(self.head_works)
        decoder, samples = self.decoder, self.cache.samples
        shares = {str(share): share for share in attention.candidates(samples, self.built_in)}
        attending = attention.row_part(self.attend, shares, f"{decoder.heads} heads of {decoder.head_width}")
        launches = (self.first_id(), *self.ask(), self.second_id())
        also = {("step", one.kernel.__name__): one.compile for one in launches}
        found = take(self.products, works, chooser, attending, seldom=2, also=also)
        if found is None:
            return False
        self.choices = found
        if attending.name in found:
            self.attend.share = shares[found[attending.name].chosen]
        self.attend.tidy()
        return True

    def forget(self) -> bool:
        """Go back to what is built in; → whether anything else had been chosen."""
        before: tuple[dict[Product, Way], Share] = ({}, self.built_in)
        changed = (self.products.chosen, self.attend.share) != before
        self.products.chosen, self.attend.share = before
        self.choices = {}
        return changed

    # --- the step ----------------------------------------------------------------------------------------------------

    def start(self, s1: Tensor, s2: Tensor, time: Tensor) -> None:
        """The first row to add: its ids [rows] and the embedded time [rows, width]."""
        self.x.copy_(self.decoder.embed(s1, s2, time))

    def __call__(self) -> None:
        """Add the row in `x` at the counters' place, generate the next pair of ids, and look its row up."""
        products = self.products
        for layer, (qkv, out, gate, down) in enumerate(self.blocks):
            products(qkv)
            self.attend(layer)
            products(out)
            products(gate)
            products(down)
        s1, values, back, s2 = self.head_works
        products(s1)
        self.first_id()()
        for launch in self.ask():
            launch()
        products(values)
        products(back)
        products(s2)
        self.second_id()()
        self.counters += 1

    def first_id(self) -> KernelLaunch:
        decoder, cache, logits = self.decoder, self.cache, self.logits[0]
        noise = logits if self.noise is None else self.noise[0]
        return KernelLaunch(
            self.kernels.first_id,
            (self.rows,),
            (
                *(logits, noise, self.x, decoder.norm, self.last, cache.own_context, self.chosen, self.ids[0]),
                *(self.counters, self.rows, cache.capacity, self.ids[0].stride(0), *self.draw),
            ),
            {**self.row_of(0), "EPSILON": EPS},
        )

    def second_id(self) -> KernelLaunch:
        cache, logits = self.cache, self.logits[1]
        noise = logits if self.noise is None else self.noise[1]
        return KernelLaunch(
            self.kernels.second_id,
            (self.rows,),
            (
                *(logits, noise, self.x, *self.tables, self.future, self.chosen, self.ids[1]),
                *(self.counters, self.rows, cache.samples, self.future.shape[1], self.ids[1].stride(0), *self.draw),
            ),
            self.row_of(1),
        )

    def row_of(self, part: int) -> dict[str, Any]:
        width = self.decoder.width
        size = self.decoder.sizes[part]
        return {"WIDTH": width, "TILE": power_of_two(width), "SIZE": size, **self.filter, "num_warps": 4}

    def ask(self) -> tuple[KernelLaunch, KernelLaunch]:
        """The second attention: the chosen s1 asks the context of the whole window."""
        cache, heads, width = self.cache, self.decoder.cross.heads, self.decoder.width
        block = 8
        blocks = -(-self.longest // block) + -(-cache.capacity // block)
        columns = 16  # few columns and many rows at a time: the rows come one after the other
        scores = KernelLaunch(
            self.kernels.context_scores,
            (self.rows, blocks),
            (
                *(self.queries, self.chosen, cache.context, cache.own_context, self.scores, self.counters),
                *(cache.lengths, cache.samples, self.longest, cache.capacity, cache.max_context),
            ),
            {"HEADS": heads, "WIDTH": width, "EVICT": cache.evict, "BLOCK": block, "BLOCK_K": 256, "num_warps": 4},
        )
        mix = KernelLaunch(
            self.kernels.context_mix,
            (self.rows, -(-width // columns)),
            (
                *(self.scores, cache.context, cache.own_context, self.mixed, self.counters),
                *(cache.samples, self.longest, cache.capacity),
            ),
            {"HEADS": heads, "WIDTH": width, "BLOCK": 128, "BLOCK_C": columns, "num_warps": 4},
        )
        return scores, mix


def query_table(decoder: Decoder) -> Tensor:
    """What each s1 asks the context, [ids, heads, width]: its query in the space of the context, scaled."""
    cross, model = decoder.cross, decoder.model
    embedded: Tensor = model.embedding.emb_s1.weight.data
    query = nn.functional.linear(embedded, cross.q_proj.weight.data, cross.q_proj.bias.data)
    by_head = query.view(len(query), cross.heads, -1).transpose(0, 1)
    asked = torch.bmm(by_head, decoder.k_weight).transpose(0, 1)
    return (asked * decoder.cross_scale).contiguous()
