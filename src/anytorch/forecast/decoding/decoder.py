# mypy: disable-error-code="no-any-return"
"""Check that a model and its tokenizer match, prepare both for inference, and keep what a growing window has computed.

`Codec` turns candles into ids and back without computing a shared row twice. `Decoder` has fused weights, tables instead of
products, and the s2 step without keys. `Cache` has keys, values and context of windows that still grow: the prompt's once
per series, the generated rows' per sample.

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
    Tables,
    attend_shared,
    attend_step,
    attend_whole,
    fused,
    make_tables,
    plain,
    rms_norm,
    rows_at_once,
    side_by_side,
    through_blocks,
    through_window,
    window_mask,
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


class Cache:
    """The state of `series` × `samples` windows. Rows are series-major. Prompts may differ in length.

    A prompt shorter than the longest is padded at its end, where causal attention does not look; later rows are kept
    from looking there by a bias.
    """

    def __init__(
        self, decoder: Decoder, lengths: Sequence[int], samples: int, capacity: int, max_context: int, evict: bool
    ) -> None:
        series, longest = len(lengths), max(lengths)
        rows = series * samples
        self.decoder, self.samples, self.capacity, self.max_context = decoder, samples, capacity, max_context
        self.lengths = torch.empty(series, dtype=torch.long, device=decoder.device)
        self.mixed = len(set(lengths)) > 1
        self.evict = evict
        kind: Any = {"device": decoder.device, "dtype": decoder.dtype}
        layers, heads, head_width, width = len(decoder.blocks), decoder.heads, decoder.head_width, decoder.width
        # One piece of memory for all layers: freed, it goes back whole, and leaves no holes in the heap.
        self.keys, self.values = torch.empty(2, layers, series, heads, longest, head_width, **kind)
        self.context = torch.empty(series, longest, width, **kind)
        # Zeros, not rubbish: a static step multiplies rows that are not there yet by a weight of zero.
        self.own_keys, self.own_values = torch.zeros(2, layers, series, heads, samples, capacity, head_width, **kind)
        self.own_context = torch.zeros(rows, capacity, width, **kind)
        # Of the generated rows, for queries (which carry the attention's scale) and for keys.
        shape = (2, series if self.mixed else 1, 1, capacity, head_width)
        self.tables: Tables = (torch.empty(shape, **kind), torch.empty(shape, **kind))
        self.places = torch.arange(longest, device=decoder.device)
        self.own_places = torch.arange(capacity, device=decoder.device)
        self.started: tuple[int, ...] = ()
        self.start(lengths)

    def start(self, lengths: Sequence[int]) -> None:
        """Begin with new prompts of the same number and the same longest length, in the same memory."""
        if self.started == tuple(lengths):
            return
        self.started = tuple(lengths)
        self.lengths.copy_(torch.tensor(lengths))
        starts = self.lengths if self.mixed else self.lengths[:1]
        tables = make_tables(starts[:, None] + self.own_places, self.decoder.head_width, self.decoder.dtype)
        for table, values in zip(self.tables, tables, strict=True):
            table[0] = values / math.sqrt(self.decoder.head_width)
            table[1] = values

    def prefill(self, prompt: Tensor, limit_rows: int) -> Tensor:
        """The prompts' first-block inputs [series, longest, width] → the context of each prompt's last row.

        `limit_rows` bounds how many rows' temporary values exist at once; a prompt goes through in up to eight pieces, so
        that beside the cache they take less than a window's would.
        """
        decoder, longest = self.decoder, prompt.shape[1]
        tables = make_tables(self.places[None], decoder.head_width, decoder.dtype)
        at_once = rows_at_once(limit_rows)
        series_at_once = max(1, limit_rows // longest)
        for first in range(0, prompt.shape[0], series_at_once):
            series = slice(first, first + series_at_once)
            for start in range(0, longest, at_once):
                rows = slice(start, min(start + at_once, longest))
                self._prefill_rows(prompt[series, rows], series, rows, tables)
        last: Tensor = self.context[torch.arange(len(self.lengths), device=prompt.device), self.lengths - 1]
        return last

    def _prefill_rows(self, x: Tensor, series: slice, rows: slice, tables: Tables) -> None:
        """Some rows of some prompts, behind those that are in the cache already."""
        cos, sin = tables
        tables = (cos[:, :, rows], sin[:, :, rows])
        mask = window_mask(rows.start, rows.stop - rows.start, x) if rows.start else None
        for block, keys, values in zip(self.decoder.blocks, self.keys, self.values, strict=True):
            q, k, v = block.project(x, tables)
            keys[series, :, rows] = k
            values[series, :, rows] = v
            seen_k, seen_v = keys[series, :, : rows.stop], values[series, :, : rows.stop]
            attended = attend_whole(q, seen_k, seen_v, mask)
            del q, k, v  # before the block's larger half needs memory
            x = block.finish(x, attended)
        self.context[series, rows] = self.decoder.context(x)

    def advance(self, x: Tensor, at: int | Tensor, skip: int = 0) -> Tensor:
        """Add the generated row `at` (its first-block input [rows, 1, width]); → its context [rows, width].

        `skip` leaves the first series out (they have begun to roll). With a tensor for `at` all shapes are fixed, so
        that the step can be recorded once and replayed.
        """
        series = len(self.lengths) - skip
        by_series = (series, len(x) // series, x.shape[-1])
        cos, sin = (one(table, 3, at) for table in self.tables)
        tables = (cos[:, skip:], sin[:, skip:]) if self.mixed else (cos, sin)
        bias = self.bias(at, skip)
        for layer, block in enumerate(self.decoder.blocks):
            q, k, v = block.turned(block.qkv_of(x), by_series, tables)  # each [series, heads, samples, head width]
            own_k, own_v = self.own_keys[layer][skip:], self.own_values[layer][skip:]
            put(own_k, 3, at, k)
            put(own_v, 3, at, v)
            prefix = (self.keys[layer][skip:], self.values[layer][skip:])
            x = block.finish(x, attend_step(q, prefix, (upto(own_k, 3, at), upto(own_v, 3, at)), bias))
        last = self.decoder.context(x)[:, 0]
        put(self.own_context[skip * self.samples :], 1, at, last)
        return last

    def s2_logits(self, last: Tensor, s1: Tensor, at: int | Tensor | None, skip: int = 0) -> Tensor:
        """s2 logits after generated row `at`; None: straight after the prompt."""
        shared = self.context[skip:]
        if at is None:
            return self.decoder.s2_logits(last, s1, shared, None, self.padding_bias(skip))
        own = upto(self.own_context[skip * self.samples :], 1, at)
        return self.decoder.s2_logits(last, s1, shared, own, *self.biases(at, skip))

    def bias(self, at: int | Tensor, skip: int) -> Tensor | None:
        """Both biases side by side, [series or 1, 1, 1, prompt + generated]; None where there is nothing to hide."""
        shared, own = self.biases(at, skip)
        if shared is None and own is None:
            return None
        if own is None:
            own = self.context.new_zeros(int(at) + 1)
        if shared is None:
            shared = self.context.new_zeros(1, 1, 1, len(self.places))
        return torch.cat((shared, own.expand(shared.shape[0], 1, 1, -1)), dim=-1)

    def padding_bias(self, skip: int) -> Tensor | None:
        if not self.mixed:
            return None
        return hidden(self.places >= self.lengths[skip:, None], self.decoder.dtype)[:, None, None]

    def biases(self, at: int | Tensor, skip: int) -> tuple[Tensor | None, Tensor | None]:
        """What row `at` must not see: padding, evicted rows, and (with a tensor) rows that are not there yet."""
        dtype, static = self.decoder.dtype, isinstance(at, Tensor)
        shared_bias = self.padding_bias(skip)
        own_bias = hidden(self.own_places > at, dtype) if static else None
        if self.evict:
            oldest = self.lengths[skip:, None] + (at + 1 - self.max_context)  # the first row still in the window
            gone = hidden(self.places < oldest, dtype)[:, None, None]
            shared_bias = gone if shared_bias is None else shared_bias + gone
            own_gone = hidden(self.own_places < at + 1 - self.max_context, dtype)
            if static:
                own_bias = own_bias + own_gone  # type: ignore[operator]
            else:
                own_bias = own_gone[: int(at) + 1]
        return shared_bias, own_bias

    @staticmethod
    def nbytes(decoder: Decoder, longest: int, samples: int, capacity: int) -> int:
        """Of one series."""
        per_row = decoder.width * (2 * len(decoder.blocks) + 1) * decoder.norm.element_size()
        return per_row * (longest + samples * capacity)


def one(table: Tensor, dim: int, at: int | Tensor) -> Tensor:
    """Row `at` of a dimension, which stays."""
    return table.index_select(dim, at) if isinstance(at, Tensor) else table.narrow(dim, at, 1)


def put(buffer: Tensor, dim: int, at: int | Tensor, value: Tensor) -> None:
    """Write row `at` of a dimension, which `value` lacks."""
    if isinstance(at, Tensor):
        buffer.index_copy_(dim, at, value.unsqueeze(dim))
    else:
        buffer.select(dim, at).copy_(value)


def upto(buffer: Tensor, dim: int, at: int | Tensor) -> Tensor:
    """The rows that are there; all of them in a step of fixed shapes."""
    return buffer if isinstance(at, Tensor) else buffer.narrow(dim, 0, at + 1)


def hidden(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where False, -inf where True."""
    return torch.zeros(mask.shape, device=mask.device, dtype=dtype).masked_fill(mask, -math.inf)
