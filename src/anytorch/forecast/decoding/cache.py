"""Keys, values and context of windows that still grow: the prompt's once per series, the generated rows' per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anytorch.forecast.decoding.decoder import Decoder
from anytorch.forecast.model.fused import Tables, attend_step, attend_whole, make_tables, rows_at_once, window_mask


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
