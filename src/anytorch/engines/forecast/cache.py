"""Keys, values and context of windows that still grow: the prompt's once per series, the generated rows' per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anytorch.engines.forecast.decoder import Decoder
from anytorch.models.kronos.fused import Tables, attend_shared, attend_whole, make_tables, per_sample


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
        self.keys = [torch.empty(series, heads, longest, head_width, **kind) for _ in range(layers)]
        self.values = [torch.empty(series, heads, longest, head_width, **kind) for _ in range(layers)]
        self.context = torch.empty(series, longest, width, **kind)
        # Zeros, not rubbish: a static step multiplies rows that are not there yet by a weight of zero.
        self.own_keys = [torch.zeros(rows, heads, capacity, head_width, **kind) for _ in range(layers)]
        self.own_values = [torch.zeros(rows, heads, capacity, head_width, **kind) for _ in range(layers)]
        self.own_context = torch.zeros(rows, capacity, width, **kind)
        shape = (rows if self.mixed else 1, 1, capacity, head_width)
        self.tables: Tables = (torch.empty(shape, **kind), torch.empty(shape, **kind))
        self.places = torch.arange(longest, device=decoder.device)
        self.own_places = torch.arange(capacity, device=decoder.device)
        self.start(lengths)

    def start(self, lengths: Sequence[int]) -> None:
        """Begin with new prompts of the same number and the same longest length, in the same memory."""
        self.lengths.copy_(torch.tensor(lengths))
        starts = per_sample(self.lengths, self.samples) if self.mixed else self.lengths[:1]
        tables = make_tables(starts[:, None] + self.own_places, self.decoder.head_width, self.decoder.dtype)
        for table, values in zip(self.tables, tables, strict=True):
            table.copy_(values)

    def prefill(self, prompt: Tensor, limit_rows: int) -> Tensor:
        """The prompts' first-block inputs [series, longest, width] → the context of each prompt's last row.

        `limit_rows` bounds how many rows' temporary values exist at once.
        """
        decoder = self.decoder
        tables = make_tables(self.places[None], decoder.head_width, decoder.dtype)
        at_once = max(1, limit_rows // prompt.shape[1])
        for start in range(0, prompt.shape[0], at_once):
            part = slice(start, start + at_once)
            x = prompt[part]
            for block, keys, values in zip(decoder.blocks, self.keys, self.values, strict=True):
                q, k, v = block.project(x, tables)
                keys[part] = k
                values[part] = v
                x = block.finish(x, attend_whole(q, keys[part], values[part]))
            self.context[part] = decoder.context(x)
        last: Tensor = self.context[torch.arange(len(self.lengths), device=prompt.device), self.lengths - 1]
        return last

    def advance(self, x: Tensor, at: int | Tensor, skip: int = 0) -> Tensor:
        """Add the generated row `at` (its first-block input [rows, 1, width]); → its context [rows, width].

        `skip` leaves the first series out (they have begun to roll). With a tensor for `at` all shapes are fixed, so
        that the step can be recorded once and replayed.
        """
        rows = slice(skip * self.samples, None)
        cos, sin = self.tables
        tables = (self._one(cos, at), self._one(sin, at))
        if self.mixed:
            tables = (tables[0][rows], tables[1][rows])
        shared_bias, own_bias = self.biases(at, skip)
        for layer, block in enumerate(self.decoder.blocks):
            q, k, v = block.project(x, tables)
            own_k, own_v = self.own_keys[layer][rows], self.own_values[layer][rows]
            put(own_k, at, k)
            put(own_v, at, v)
            attended = attend_shared(
                q,
                (self.keys[layer][skip:], self.values[layer][skip:]),
                (upto(own_k, at), upto(own_v, at)),
                shared_bias,
                own_bias,
            )
            x = block.finish(x, attended)
        last = self.decoder.context(x)
        put(self.own_context[rows].unsqueeze(1), at, last.unsqueeze(1))
        return last[:, 0]

    def s2_logits(self, last: Tensor, s1: Tensor, at: int | Tensor | None, skip: int = 0) -> Tensor:
        """s2 logits after generated row `at`; None: straight after the prompt."""
        shared = self.context[skip:]
        if at is None:
            bias = self.padding_bias(skip)
            return self.decoder.s2_logits(last, s1, shared, None, bias)
        own = upto(self.own_context[skip * self.samples :].unsqueeze(1), at).squeeze(1)
        return self.decoder.s2_logits(last, s1, shared, own, *self.biases(at, skip))

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

    def _one(self, table: Tensor, at: int | Tensor) -> Tensor:
        return table.index_select(2, at) if isinstance(at, Tensor) else table[:, :, at : at + 1]

    @staticmethod
    def nbytes(decoder: Decoder, longest: int, samples: int, capacity: int) -> int:
        """Of one series."""
        per_row = decoder.width * (2 * len(decoder.blocks) + 1) * decoder.s1_rows.element_size()
        return per_row * (longest + samples * capacity)


def put(buffer: Tensor, at: int | Tensor, value: Tensor) -> None:
    """Write one row into [batch, heads, capacity, e]."""
    if isinstance(at, Tensor):
        buffer.index_copy_(2, at, value)
    else:
        buffer[:, :, at : at + 1] = value


def upto(buffer: Tensor, at: int | Tensor) -> Tensor:
    """The rows that are there; all of them in a step of fixed shapes."""
    return buffer if isinstance(at, Tensor) else buffer[:, :, : at + 1]


def hidden(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where False, -inf where True."""
    return torch.zeros(mask.shape, device=mask.device, dtype=dtype).masked_fill(mask, -math.inf)
