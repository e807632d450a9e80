"""One Kronos model, made ready to generate: fused weights, tables instead of products, and the s2 step without keys.

Three products of the published step are not needed, and leaving them out is exact:
- fusion_proj over both embeddings is a sum of two looked-up rows, if the tables are multiplied by it once (where memory
  counts more than a fiftieth of a step's arithmetic, they are not);
- in the dependency layer a single query has no positions, so q·(W c + b) = (Wᵀq)·c + a constant that softmax ignores:
  the context itself serves as keys and values of all four heads, and no row of it is ever projected;
- heads are applied to the last row only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from anytorch.forecast.decoding.replayed import Replayed
from anytorch.forecast.model import Kronos
from anytorch.forecast.model.fused import FusedBlock, Make, attend_shared, fused, plain, rms_norm


class Decoder:
    """What generation needs of a model. Built per model and device; `fits` says whether the weights have changed."""

    def __init__(self, model: Kronos, make: Make = plain, tables: bool = True, record: bool = False) -> None:
        self.model = model
        self.unpacked = make is plain  # the layers' own weights are what computes
        self.blocks = [FusedBlock.of(block, fused(make)) for block in model.transformer]  # type: ignore[arg-type]
        self.heads, self.width = model.n_heads, model.d_model
        self.head_width = self.width // self.heads
        self.device, self.dtype = model.norm.weight.device, model.norm.weight.dtype
        self.sizes = (2**model.s1_bits, 2**model.s2_bits)
        self.tables: tuple[Tensor, Tensor] | None = None
        if tables:
            with torch.no_grad():
                self.tables = self._fusion_tables()
        self.norm = model.norm.weight.data
        cross = model.dep_layer.cross_attn
        self.cross = cross
        self.k_weight = cross.k_proj.weight.data.view(cross.heads, cross.head_width, self.width)
        self.v_weight = cross.v_proj.weight.data.view(cross.heads, cross.head_width, self.width)
        self.cross_scale = 1 / math.sqrt(cross.head_width)
        self.built_from = versions(model)
        self.replayed = Replayed(self.device, record)
        # What the next forecast of the same shape can use again (see generate.py).
        self.kept: Any = None
        self.kept_rolled: Any = None

    def fits(self, model: Kronos) -> bool:
        """True if this still matches `model`, which training, loading or moving changes."""
        return model is self.model and versions(model) == self.built_from

    def _fusion_tables(self) -> tuple[Tensor, Tensor]:
        embedding, width = self.model.embedding, self.width
        scale = math.sqrt(width)
        weight, bias = embedding.fusion_proj.weight, embedding.fusion_proj.bias
        s1 = torch.addmm(bias, embedding.emb_s1.weight, weight[:, :width].t(), alpha=scale)
        s2 = torch.mm(embedding.emb_s2.weight, weight[:, width:].t()) * scale
        return s1, s2

    def embed(self, s1: Tensor, s2: Tensor, time: Tensor) -> Tensor:
        """Ids [rows, n] and their time embedding (broadcast to [rows, n, width]) → the first block's input."""
        if self.tables is None:
            row: Tensor = self.model.embedding((s1, s2))
            return row.add_(time)
        first, second = self.tables
        return first[s1] + second[s2] + time

    def time(self, stamp: Tensor) -> Tensor:
        return self.replayed("time", self.model.time_emb, stamp)

    def context(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.norm)

    def s1_logits(self, last: Tensor) -> Tensor:
        """From the context of the last row, [rows, width]."""
        logits: Tensor = self.model.head.proj_s1(last)
        return logits

    def s2_logits(
        self,
        last: Tensor,
        s1: Tensor,
        shared: Tensor,
        own: Tensor | None,
        shared_bias: Tensor | None = None,
        own_bias: Tensor | None = None,
    ) -> Tensor:
        """Given the chosen s1 [rows] and the context of the whole window.

        shared [series, L, width] and own [series × samples, m, width] are the window's context rows.
        """
        rows, heads = last.shape[0], self.cross.heads
        query = self.cross.q_proj(self.model.embedding.emb_s1(s1)).view(rows, heads, -1).transpose(0, 1)
        query = torch.bmm(query, self.k_weight).transpose(0, 1)  # [rows, heads, width]: in the space of the context
        # Four heads over one and the same set of keys: they go as four queries of one head.
        attended = attend_shared(
            query.unsqueeze(1),
            (shared.unsqueeze(1), shared.unsqueeze(1)),
            None if own is None else (own.unsqueeze(1), own.unsqueeze(1)),
            shared_bias,
            own_bias,
            scale=self.cross_scale,
        ).squeeze(1)
        values = torch.bmm(attended.transpose(0, 1), self.v_weight.transpose(1, 2)).transpose(0, 1)
        values = values.reshape(rows, self.width) + self.cross.v_proj.bias
        knowing = rms_norm(last + self.cross.out_proj(values), self.model.dep_layer.norm.weight)
        logits: Tensor = self.model.head.proj_s2(knowing)
        return logits


def versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())
