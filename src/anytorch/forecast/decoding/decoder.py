# mypy: disable-error-code="no-any-return"
"""Check that a model and its tokenizer match, and prepare both for inference.

`Codec` turns candles into ids and back without computing a shared row twice. `Decoder` has fused weights, tables instead of
products, and the s2 step without keys.

Three products of the published step are not needed, and leaving them out is exact:
- fusion_proj over both embeddings is a sum of two looked-up rows, if the tables are multiplied by it once (where memory
  counts more than a fiftieth of a step's arithmetic, they are not);
- in the dependency layer a single query has no positions, so q·(W c + b) = (Wᵀq)·c + a constant that softmax ignores:
  the context itself serves as keys and values of all four heads, and no row of it is ever projected;
- heads are applied to the last row only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anytorch.errors import ModelError, UsageError
from anytorch.forecast.model import Kronos, KronosTokenizer
from anytorch.forecast.model.fused import (
    Apply,
    FusedBlock,
    Make,
    attend_shared,
    fused,
    plain,
    rms_norm,
    side_by_side,
    through_blocks,
    through_window,
)
from anytorch.forecast.model.tokenizer import split_ids
from anytorch.quant.formats import parse
from anytorch.quant.linear import QuantLinear
from anytorch.recorded.graphs import MOST_GRAPHS, Recorder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_pair(model: Any, tokenizer: Any) -> None:
    if isinstance(model, KronosTokenizer) and isinstance(tokenizer, Kronos):
        raise ModelError("model and tokenizer are in the wrong order", hint="KronosPredictor(model, tokenizer)")
    for name, given, cls in (("model", model, Kronos), ("tokenizer", tokenizer, KronosTokenizer)):
        other = isinstance(given, (Kronos, KronosTokenizer)) and not isinstance(given, cls)
        if other or not hasattr(given, "s1_bits"):  # what wraps one (torch.compile) passes its attributes on
            raise ModelError(
                f"the {name} is a {type(given).__name__}, not a {cls.__name__}",
                hint=f"load it with {cls.__name__}.from_pretrained, or both with anytorch.load_predictor",
            )
    if (model.s1_bits, model.s2_bits) != (tokenizer.s1_bits, tokenizer.s2_bits):
        raise ModelError(
            f"the model uses {model.s1_bits}+{model.s2_bits} bits, the tokenizer {tokenizer.s1_bits}+{tokenizer.s2_bits}",
            hint="load the tokenizer that the model was trained with",
        )
    if tokenizer.d_in != 6:
        raise ModelError(f"the tokenizer reads {tokenizer.d_in} columns; a forecast has 6")


def prepared(model: Kronos, device: torch.device, dtype: str | torch.dtype | None) -> Kronos:
    """The model in eval mode on its device, as it is or as a rounded copy."""
    if dtype is not None:
        wanted = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if wanted not in DTYPES.values():
            raise UsageError(f"dtype is {dtype!r}; use one of: {', '.join(DTYPES)}")
        if wanted != model.norm.weight.dtype:
            model = copy.deepcopy(model).to(wanted)
    return model.to(device).eval()


def layer_maker(quantization: str | None) -> Make:
    """What computes the blocks' linear layers: they are nine tenths of the model, and all that is quantized."""
    if quantization is None:
        return plain
    format = parse(quantization)

    def packed(weight: Tensor, bias: Tensor | None) -> Apply:
        layer = torch.nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias, requires_grad=False)
        return QuantLinear.of(layer, format)

    return packed


class Replayed:
    """Calls functions; those that come again with the same shapes are recorded and replayed, if `record`."""

    def __init__(self, device: torch.device, record: bool) -> None:
        self.device = device
        self.recorder = Recorder(device) if record else None
        self.inputs: dict[Hashable, list[Tensor]] = {}

    def __call__(self, name: Hashable, work: Callable[..., Tensor], *given: Tensor) -> Tensor:
        """`work(*given)`, on the device. `name` stands for all that it depends on besides the tensors."""
        if self.recorder is None or self.recorder.failed:
            return work(*(part.to(self.device) for part in given))
        key = (name, *((part.shape, part.dtype) for part in given))
        kept = self.inputs.get(key)
        if kept is None:
            if len(self.inputs) >= MOST_GRAPHS:
                self.inputs.clear()
                self.recorder.clear()
            kept = self.inputs[key] = [part.to(self.device, copy=True) for part in given]
        else:
            for there, part in zip(kept, given, strict=True):
                there.copy_(part)
        return self.recorder.run(key, lambda: work(*kept)).clone()


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
        return self.model.head.proj_s1(last)

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
        return self.model.head.proj_s2(knowing)


def versions(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())


class Codec:
    """A tokenizer with fused blocks. Without `fuse` its weights stay where they are: less memory, a little more work."""

    def __init__(self, tokenizer: KronosTokenizer, fuse: bool = True, record: bool = False) -> None:
        self.tokenizer = tokenizer
        self.replayed = Replayed(tokenizer.embed.weight.device, record)
        join_layers = fused(plain) if fuse else side_by_side
        self.encoder = [FusedBlock.of(block, join_layers) for block in tokenizer.encoder]  # type: ignore[arg-type]
        self.decoder = [FusedBlock.of(block, join_layers) for block in tokenizer.decoder]  # type: ignore[arg-type]
        self.device = tokenizer.embed.weight.device
        self.dtype = tokenizer.embed.weight.dtype
        self.built_from = versions(tokenizer)

    def fits(self, tokenizer: KronosTokenizer) -> bool:
        """True if this still matches `tokenizer`."""
        return tokenizer is self.tokenizer and versions(tokenizer) == self.built_from

    def encode(self, values: Sequence[Tensor], keep: int, limit_rows: int) -> list[tuple[Tensor, Tensor]]:
        """Normalised candles [rows, 6] of each series → s1 and s2 of its last `keep` rows.

        The whole history is encoded, as published. Series are padded at the end, where causal attention does not look.
        """
        found: list[tuple[Tensor, Tensor]] = []
        for part in pieces(values, limit_rows):
            x = torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True).to(self.dtype)
            s1, s2 = self.replayed(("encode", limit_rows), partial(self._ids, limit_rows), x)
            found += [
                (s1[row, max(0, len(one) - keep) : len(one)], s2[row, max(0, len(one) - keep) : len(one)])
                for row, one in enumerate(part)
            ]
        return found

    def _ids(self, limit_rows: int, x: Tensor) -> Tensor:
        hidden = self.tokenizer.embed(x)
        if self.encoder:
            hidden = through_blocks(self.encoder, hidden, limit_rows)
        return torch.stack(split_ids(self.tokenizer.quant_embed(hidden), self.tokenizer.s1_bits))

    def decode(self, shared: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor], limit_rows: int) -> Tensor:
        """Ids of windows → normalised candles of their own rows, float32 [series × samples, n, 6].

        shared: s1 and s2 [series, L] of the windows' first rows, or None; own: [series × samples, n].
        """

        def work(*ids: Tensor) -> Tensor:
            return self._decode(None if shared is None else (ids[2], ids[3]), (ids[0], ids[1]), limit_rows)

        return self.replayed(("decode", limit_rows), work, *own, *(shared or ()))

    def _decode(self, shared: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor], limit_rows: int) -> Tensor:
        before = 0 if shared is None else shared[0].shape[1]
        if shared is not None and shared[0].shape[0] == own[0].shape[0]:  # one sample each: there is nothing to share
            whole = [torch.cat(parts, dim=1) for parts in zip(shared, own, strict=True)]
            at_once = max(1, limit_rows // whole[0].shape[1])
            parts_decoded = [
                self.tokenizer.decode([part[start : start + at_once] for part in whole], half=True)[:, before:]
                for start in range(0, len(whole[0]), at_once)
            ]
            return torch.cat(parts_decoded).float()
        hidden = self._embed(*own)
        if self.decoder and shared is not None and before:
            _, hidden = through_window(self.decoder, self._embed(*shared), hidden, limit_rows)
        elif self.decoder:
            hidden = through_blocks(self.decoder, hidden, limit_rows)
        return self.tokenizer.head(hidden).float()

    def _embed(self, s1: Tensor, s2: Tensor) -> Tensor:
        return self.tokenizer.post_quant_embed(self.tokenizer.codes(s1, s2))


def pieces(values: Sequence[Tensor], limit_rows: int) -> list[Sequence[Tensor]]:
    """Consecutive series whose padded rows stay below the limit; a single one may pass it."""
    found: list[Sequence[Tensor]] = []
    start = 0
    while start < len(values):
        end = start + 1
        while end < len(values) and (end + 1 - start) * max(map(len, values[start : end + 1])) <= limit_rows:
            end += 1
        found.append(values[start:end])
        start = end
    return found
