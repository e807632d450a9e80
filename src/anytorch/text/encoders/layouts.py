"""How a batch of texts of different lengths lies in memory, attention within it, and pooling.

    Packed      tokens end to end, attention by a variable-length flash kernel: no padding at all
    OneByOne    tokens end to end, attention text by text: no padding, one call per text and layer; runs anywhere
    Rows        texts padded to one length, attention by scaled_dot_product_attention with a mask; runs anywhere

All three give the same answer; which is fastest depends on the device, the dtype and the texts (`strategy`). A layout is
made of tensors on the device and of plain numbers that fix the shapes, so that a recorded graph can be replayed with new
contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from anytorch.errors import UsageError


class Layout(Protocol):
    rows: int  # texts, including those added to fill a fixed shape
    longest: int  # no text has more tokens than this
    positions: Tensor  # each token's place in its text, [tokens]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, causal: bool, bias: Tensor | None) -> Tensor:
        """Attention of every text within itself: q [tokens, heads, head_width] → the same shape.

        `window` > 0 admits keys at most so far away, `causal` only earlier ones; `bias` is [heads, longest, longest].
        """

    def reduce(self, x: Tensor, how: str) -> Tensor:
        """ "sum" or "max" of every text's own rows of x [tokens, width], in float32: [rows, width]."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of every text, [rows]."""

    @property
    def first(self) -> Tensor:
        """Row of every text's first token, [rows]."""


def share_heads(k: Tensor, v: Tensor, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for grouped queries: masks and GQA together leave torch's fast kernels."""
    groups = heads // k.shape[dim]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim), v.repeat_interleave(groups, dim))


def allowed(length: int, window: int, causal: bool, device: torch.device) -> Tensor | None:
    """[length, length], True where a query (row) may see a key (column); None where it may see all."""
    if not causal and (window == 0 or window >= length - 1):
        return None
    places = torch.arange(length, device=device)
    ahead = places[None, :] - places[:, None]
    mask = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return mask & (ahead.abs() <= window) if window else mask


class Ends:
    """Texts end to end: `starts` [rows + 1] holds where each begins, int32. Tokens after the last text belong to no text."""

    def __init__(self, starts: Tensor, tokens: int, longest: int) -> None:
        self.starts, self.tokens, self.longest = starts, tokens, longest
        self.rows = starts.shape[0] - 1
        places = torch.arange(tokens, dtype=starts.dtype, device=starts.device)
        self.text = torch.searchsorted(starts, places, right=True) - 1  # of each token; `rows` for tokens nobody owns
        # The filling behind the last text may be longer than any text: its positions must still be in the table.
        self.positions = (places - starts[self.text]).clamp(max=longest - 1)

    @property
    def lengths(self) -> Tensor:
        return self.starts[1:] - self.starts[:-1]

    @property
    def first(self) -> Tensor:
        return self.starts[:-1]

    def reduce(self, x: Tensor, how: str) -> Tensor:
        return torch.segment_reduce(x.float(), how, offsets=self.starts, axis=0, unsafe=True)


ShortAttention = Callable[..., Tensor]  # `kernels.attend_short`


class Packed(Ends):
    """Needs a flash kernel for variable lengths: half precision and no bias. `strategy` tries it before it is used.

    `short` attends where no text is longer than a tile, if given.
    """

    def __init__(self, starts: Tensor, tokens: int, longest: int, short: ShortAttention | None = None) -> None:
        super().__init__(starts, tokens, longest)
        self.short = short

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, causal: bool, bias: Tensor | None) -> Tensor:
        assert bias is None, "the flash kernel adds no bias"
        if self.short is not None:
            return self.short(q, k, v, self.starts, self.longest, window=window, causal=causal)
        # aten::_flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        #     return_debug_mask, *, scale, window_size_left, window_size_right, …) is what torch.nn.attention.varlen
        # calls; the public function's arguments still change from release to release.
        left, right = (window, 0 if causal else window) if window else (None, None)
        answer: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
            q, k, v, self.starts, self.starts, self.longest, self.longest, 0.0, causal, False,
            window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return answer[0]


class OneByOne(Ends):
    """`bounds` are the starts again, on the host: slicing by device values would wait for the device."""

    def __init__(self, starts: Tensor, tokens: int, longest: int, bounds: list[int]) -> None:
        super().__init__(starts, tokens, longest)
        self.bounds = bounds
        self._masks: dict[tuple[int, int, bool], Tensor | None] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, causal: bool, bias: Tensor | None) -> Tensor:
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)  # [heads, tokens, head_width]
        k, v = share_heads(k, v, q.shape[0], 0)
        mixed = torch.zeros_like(q)
        for begin, end in pairwise(self.bounds):
            if begin < end:
                mask = self._mask(end - begin, window, causal, q, bias)
                mixed[:, begin:end] = F.scaled_dot_product_attention(
                    q[None, :, begin:end], k[None, :, begin:end], v[None, :, begin:end], attn_mask=mask
                )[0]
        return mixed.transpose(0, 1)

    def _mask(self, length: int, window: int, causal: bool, q: Tensor, bias: Tensor | None) -> Tensor | None:
        key = (length, window, causal)
        if key not in self._masks:
            self._masks[key] = allowed(length, window, causal, q.device)
        mask = self._masks[key]
        if bias is None:
            return mask
        near = bias[None, :, :length, :length].to(q.dtype)
        return near if mask is None else near.masked_fill(~mask, float("-inf"))


class Rows:
    """`rows` texts of `longest` tokens each, filled up behind their own. Every text has at least one token."""

    def __init__(self, lengths: Tensor, longest: int) -> None:
        self.lengths, self.longest = lengths, longest
        self.rows = lengths.shape[0]
        places = torch.arange(longest, dtype=lengths.dtype, device=lengths.device)
        self.positions = places.repeat(self.rows)
        self.owned = places[None, :] < lengths[:, None]  # [rows, longest], False in the filling
        self._masks: dict[tuple[int, bool], Tensor] = {}

    @property
    def first(self) -> Tensor:
        return torch.arange(self.rows, dtype=self.lengths.dtype, device=self.lengths.device) * self.longest

    def reduce(self, x: Tensor, how: str) -> Tensor:
        x = x.float().view(self.rows, self.longest, -1)
        if how == "sum":
            return x.masked_fill(~self.owned[..., None], 0.0).sum(1)
        return x.masked_fill(~self.owned[..., None], float("-inf")).amax(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int, causal: bool, bias: Tensor | None) -> Tensor:
        shape = (self.rows, self.longest)
        q, k, v = (x.reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # [rows, heads, longest, width]
        k, v = share_heads(k, v, q.shape[1], 1)
        mask = self._mask(window, causal, q, bias)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(0, 1)

    def _mask(self, window: int, causal: bool, q: Tensor, bias: Tensor | None) -> Tensor:
        """Added to the scores; made once per batch and kind of layer."""
        key = (window, causal)
        if key not in self._masks:
            seen = self.owned[:, None, None, :]  # [rows, 1, 1, longest]
            near = allowed(self.longest, window, causal, q.device)
            if near is not None:
                # A query far out in the filling would see no key at all, and become NaN: let it see itself.
                seen = (seen & near) | torch.eye(self.longest, dtype=torch.bool, device=q.device)
            base = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            mask = base.masked_fill(~seen, float("-inf"))
            if bias is not None:
                mask = mask + bias[None].to(q.dtype)
            self._masks[key] = mask.expand(-1, -1, self.longest, -1)
        return self._masks[key]


# --- from token states to one vector per text, in float32; named as sentence-transformers names them ------------------

POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def check_pooling(pooling: str | Sequence[str]) -> tuple[str, ...]:
    names = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    for name in names:
        if name not in POOLINGS:
            raise UsageError(f"unknown pooling {name!r}; poolings: {', '.join(POOLINGS)}")
    if not names:
        raise UsageError(f"no pooling was named; poolings: {', '.join(POOLINGS)}")
    return names


def pool(x: Tensor, layout: Layout, poolings: Sequence[str]) -> Tensor:
    """x [tokens, width] → [rows, width × poolings] in float32. Rows without a text hold arbitrary values."""
    vectors = [pool_one(x, layout, name) for name in poolings]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, dim=-1)


def pool_one(x: Tensor, layout: Layout, pooling: str) -> Tensor:
    if pooling == "cls":
        return x.index_select(0, layout.first.clamp(max=x.shape[0] - 1)).float()
    if pooling == "lasttoken":
        return x.index_select(0, (layout.first + layout.lengths - 1).clamp(min=0)).float()
    if pooling == "max":
        return layout.reduce(x, "max")
    lengths = layout.lengths.clamp(min=1)[:, None].float()
    if pooling == "weightedmean":  # a token counts as much as its place: the last ones of a decoder have seen the most
        summed = layout.reduce(x.float() * (layout.positions + 1)[:, None].float(), "sum")
        return summed / (lengths * (lengths + 1) / 2)
    summed = layout.reduce(x, "sum")
    return summed / (lengths if pooling == "mean" else lengths.sqrt())


def normalise(x: Tensor) -> Tensor:
    """Each row to length 1; a row of zeros stays one, as sentence-transformers has it."""
    return F.normalize(x, dim=-1)
