"""The transformer blocks for inference: fused projections, and attention to a prefix that many rows share.

Nothing here changes what is computed, only what is computed twice: q, k and v are one product, w1 and w3 are one, and
the samples of one series read one copy of the keys and values of their common history.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anytorch.forecast.model.layers import EPS, TransformerBlock, inverse_frequencies, rotary_tables

Apply = Callable[[Tensor], Tensor]
Make = Callable[[Tensor, "Tensor | None"], Apply]
Join = Callable[..., Apply]  # linear layers that read the same input → their outputs side by side
Tables = tuple[Tensor, Tensor]  # cos and sin, each [rows or 1, 1, positions, head width]


def fuse(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight and one bias for layers that read the same input.

    The layers' own parameters become views of them: there is no second copy, and what an optimiser or
    `load_state_dict` writes is seen here. Called again, it finds them side by side and moves nothing.
    """
    bias = join([layer.bias for layer in layers]) if layers[0].bias is not None else None
    return join([layer.weight for layer in layers]), bias


@torch.inference_mode(False)
@torch.no_grad()
def join(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0].data
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    if adjacent(parts):
        return first.as_strided(shape, first.stride())
    whole = torch.cat([part.data for part in parts])
    start = 0
    for part in parts:
        end = start + part.shape[0]
        part.data = whole[start:end]
        start = end
    return whole


def adjacent(parts: Sequence[Tensor]) -> bool:
    """True if the parameters are adjacent in one storage."""
    start = parts[0]
    expected = start.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != start.untyped_storage().data_ptr()
            or part.storage_offset() != expected
            or not part.is_contiguous()
        ):
            return False
        expected += part.numel()
    return expected > start.storage_offset() + start.numel() or len(parts) == 1


def plain(weight: Tensor, bias: Tensor | None) -> Apply:
    """The linear layer with these."""
    return partial(F.linear, weight=weight, bias=bias)


def fused(make: Make) -> Join:
    """Layers that read the same input as one product."""
    return lambda *layers: make(*fuse(layers))


def side_by_side(*layers: nn.Linear) -> Apply:
    """The same values from one product each: for layers whose weights shall stay where they are."""

    def apply(x: Tensor) -> Tensor:
        found = [F.linear(x, layer.weight, layer.bias) for layer in layers]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    return apply


@dataclass(frozen=True)
class FusedBlock:
    """One block: what it needs, and nothing of how it was trained."""

    heads: int
    norm1: Tensor
    qkv: Apply
    out: Apply
    norm2: Tensor
    gate_and_value: Apply  # w1 and w3
    down: Apply  # w2

    @classmethod
    def of(cls, block: TransformerBlock, join_layers: Join | None = None) -> FusedBlock:
        """`join_layers` says how the linear layers are computed: `fused(make)`, perhaps quantized, or `side_by_side`."""
        attention, ffn, join_layers = block.self_attn, block.ffn, join_layers or fused(plain)
        return cls(
            heads=attention.heads,
            norm1=block.norm1.weight.data,
            qkv=join_layers(attention.q_proj, attention.k_proj, attention.v_proj),
            out=join_layers(attention.out_proj),
            norm2=block.norm2.weight.data,
            gate_and_value=join_layers(ffn.w1, ffn.w3),
            down=join_layers(ffn.w2),
        )

    def project(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (both turned to their positions) and v of windows: each [batch, heads, rows, head width]."""
        return self.turned(self.qkv_of(x), x.shape, tables)

    def qkv_of(self, x: Tensor) -> Tensor:
        """q, k and v as one product, […, 3 × width]."""
        return self.qkv(rms_norm(x, self.norm1))

    def turned(self, qkv: Tensor, shape: Sequence[int], tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """The three of them from their product, for rows of `shape`."""
        batch, rows, width = shape
        qkv = qkv.view(batch, rows, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k = turn(qkv[:2], tables)
        return q, k, qkv[2]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The rest of the block, from the attention's [batch, heads, rows, head width] (or that of `attend_step`)."""
        return self.rest(x, attended.transpose(1, 2).reshape(x.shape))

    def through(self, x: Tensor, attend: Apply) -> Tensor:
        """The whole block; `attend` takes q, k and v side by side, [rows, 3 × width], and gives [rows, width]."""
        return self.rest(x, attend(self.qkv_of(x).flatten(0, -2)).view(x.shape))

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended)
        gate, value = self.gate_and_value(rms_norm(x, self.norm2)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate, inplace=True).mul_(value))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def turn(x: Tensor, tables: Tables) -> Tensor:
    """`rotate` with tables whose sin already carries the sign of the swapped half."""
    cos, sin = tables
    half = x.shape[-1] // 2
    return (x * cos).addcmul_(torch.cat((x[..., half:], x[..., :half]), dim=-1), sin)


@lru_cache(maxsize=16)
def frequencies_on(device: torch.device, head_width: int) -> Tensor:
    """There once and for all: a copy from the host cannot be part of a recording."""
    with torch.inference_mode(False):
        return inverse_frequencies(head_width).to(device)


def make_tables(positions: Tensor, head_width: int, dtype: torch.dtype) -> Tables:
    """Tables for `turn` from positions [rows, n] (or [1, n] where all rows share theirs)."""
    rows, count = positions.shape
    cos, sin = rotary_tables(positions.reshape(-1), frequencies_on(positions.device, head_width))
    sin = torch.cat((-sin[:, : head_width // 2], sin[:, head_width // 2 :]), dim=-1)
    return cos.to(dtype).view(rows, 1, count, head_width), sin.to(dtype).view(rows, 1, count, head_width)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Causal attention of rows to themselves; with a `window_mask`, also to the rows before them."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def attend_step(q: Tensor, prefix: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """Attention of one row of every sample to its series' prefix and its own rows; one softmax over both.

    q [series, heads, samples, e], scaled already; prefix k and v [series, heads, L, e]; own k and v [series, heads,
    samples, m, e]. The bias is broadcast to [series, heads, samples, L + m]. → [series, heads, samples, e].
    """
    series, heads, samples, e = q.shape
    length, m = prefix[0].shape[2], own[0].shape[3]
    keys, values = (part.reshape(series * heads, length, e) for part in prefix)
    own_keys, own_values = (part.reshape(series * heads * samples, m, e) for part in own)
    flat = q.contiguous().view(series * heads, samples, e)
    scores = torch.bmm(flat, keys.transpose(1, 2))
    own_scores = torch.bmm(flat.view(-1, 1, e), own_keys.transpose(1, 2))
    together = torch.cat((scores, own_scores.view(series * heads, samples, m)), dim=-1)
    if bias is not None:
        together = (together.view(series, heads, samples, -1) + bias).view(series * heads, samples, -1)
    weights = softmax(together)
    shared = torch.bmm(weights[..., :length], values)
    both = torch.baddbmm(shared.view(-1, 1, e), weights[..., length:].reshape(-1, 1, m), own_values)
    return both.view(series, heads, samples, e)


def attend_shared(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    suffix: tuple[Tensor, Tensor] | None,
    prefix_bias: Tensor | None = None,
    suffix_bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of every sample's queries to its series' prefix and to its own suffix; one softmax over both.

    q [series × samples, heads, n, e]; prefix k and v [series, heads, L, e]; suffix k and v [series × samples, heads, m,
    e]. A bias (0 or -inf) is broadcast to [series, heads, samples × n, L] and [series × samples, heads, n, m].
    """
    rows, e = q.shape[0], q.shape[-1]
    prefix_k, prefix_v = prefix
    series, length = prefix_k.shape[0], prefix_k.shape[2]
    samples = rows // series
    q = q * (1 / math.sqrt(e) if scale is None else scale)
    together = by_series(q, series)  # [series, heads, samples × n, e]
    scores = together @ prefix_k.transpose(-1, -2)
    if prefix_bias is not None:
        scores = scores + prefix_bias
    if suffix is None:
        return by_row(softmax(scores) @ prefix_v, samples)
    suffix_k, suffix_v = suffix
    own = q @ suffix_k.transpose(-1, -2)  # [rows, heads, n, m]
    if suffix_bias is not None:
        own = own + suffix_bias
    weights = softmax(torch.cat((scores, by_series(own, series)), dim=-1))
    shared = by_row(weights[..., :length] @ prefix_v, samples)
    return shared + by_row(weights[..., length:], samples) @ suffix_v


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def by_series(x: Tensor, series: int) -> Tensor:
    """[series × samples, heads, n, e] → [series, heads, samples × n, e]."""
    rows, heads, n, e = x.shape
    if rows == series:
        return x
    return x.view(series, rows // series, heads, n, e).transpose(1, 2).reshape(series, heads, -1, e)


def per_sample(x: Tensor, samples: int) -> Tensor:
    """Rows of series [series, …] → the same for each of their samples [series × samples, …]."""
    if samples == 1:
        return x
    return x.unsqueeze(1).expand(-1, samples, *(-1 for _ in x.shape[1:])).reshape(-1, *x.shape[1:])


def by_row(x: Tensor, samples: int) -> Tensor:
    """The inverse of `by_series`."""
    if samples == 1:
        return x
    series, heads, together, e = x.shape
    n = together // samples
    return x.view(series, heads, samples, n, e).transpose(1, 2).reshape(-1, heads, n, e)


def laid_out(shared: Tensor, own: Tensor) -> Tensor:
    """Each sample's own rows behind those that its series shares."""
    return torch.cat((per_sample(shared, len(own) // len(shared)), own), dim=2)


def attend_masked(q: Tensor, prefix: tuple[Tensor, Tensor], suffix: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """`attend_shared` for many rows: there the scores would be larger than keys and values laid side by side once."""
    k, v = (laid_out(*parts) for parts in zip(prefix, suffix, strict=True))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_products(q: Tensor, prefix: tuple[Tensor, Tensor], suffix: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """`attend_masked` as two plain products: where a fused kernel has too few queries to fill the device."""
    rows, heads, n, e = q.shape
    k, v = (laid_out(*parts).flatten(0, 1) for parts in zip(prefix, suffix, strict=True))
    hidden = mask.expand(rows * heads, -1, -1)
    scores = torch.baddbmm(hidden, q.reshape(-1, n, e), k.transpose(1, 2), alpha=1 / math.sqrt(e))
    return torch.bmm(softmax(scores), v).view(rows, heads, n, e)


def window_mask(length: int, n: int, like: Tensor) -> Tensor:
    """[n, length + n]: 0 where one of a window's last n rows may look, -inf where it may not."""
    hidden = torch.full((n, length + n), -math.inf, device=like.device, dtype=like.dtype)
    return hidden.triu_(length + 1)


def through_blocks(blocks: Sequence[FusedBlock], x: Tensor, limit_rows: int) -> Tensor:
    """Whole windows [windows, rows, width] through all blocks, keeping no cache.

    `limit_rows` bounds how many rows' temporary values exist at once.
    """
    tables, at_once = window_tables(blocks, x, x.shape[1]), rows_at_once(limit_rows)
    for block in blocks:
        parts = [whole_layer(block, part, tables, at_once)[0] for part in x.split(max(1, limit_rows // x.shape[1]))]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        del parts  # they are all of x once more, and the next block makes new ones
    return x


def window_tables(blocks: Sequence[FusedBlock], x: Tensor, reach: int) -> Tables:
    positions = torch.arange(reach, device=x.device)[None]
    return make_tables(positions, x.shape[-1] // blocks[0].heads, x.dtype)


def through_window(blocks: Sequence[FusedBlock], shared: Tensor, own: Tensor, limit_rows: int) -> tuple[Tensor, Tensor]:
    """`through_blocks` of rows that samples share once, and of their own rows each.

    shared [series, L, width] are the window's first rows, own [series × samples, n, width] the rest.
    """
    length = shared.shape[1]
    cos, sin = window_tables(blocks, own, length + own.shape[1])
    first, second = (cos[:, :, :length], sin[:, :, :length]), (cos[:, :, length:], sin[:, :, length:])
    at_once = rows_at_once(limit_rows)
    mask = window_mask(length, own.shape[1], own)
    for block in blocks:
        samples = own.shape[0] // shared.shape[0]
        finished_shared, finished_own = torch.empty_like(shared), torch.empty_like(own)
        series_at_once = max(1, limit_rows // (length + samples * own.shape[1]))
        for start in range(0, shared.shape[0], series_at_once):
            end = min(start + series_at_once, shared.shape[0])
            finished_shared[start:end], k, v = whole_layer(block, shared[start:end], first, at_once)
            # Many samples of one series may be too much by themselves: then a few of them at a time.
            step = samples if series_at_once > 1 else max(1, min(samples, limit_rows // own.shape[1]))
            for low in range(start * samples, end * samples, (end - start) * step):
                high = min(low + (end - start) * step, end * samples)
                q, own_k, own_v = block.project(own[low:high], second)
                attended = attend_masked(q, (k, v), (own_k, own_v), mask)
                finished_own[low:high] = block.finish(own[low:high], attended)
        shared, own = finished_shared, finished_own
    return shared, own


def rows_at_once(limit_rows: int) -> int:
    """Of one window: few enough that a block's temporary values take less memory than the window's keys and values."""
    return max(1, limit_rows // 8)


def whole_layer(block: FusedBlock, x: Tensor, tables: Tables, at_once: int) -> tuple[Tensor, Tensor, Tensor]:
    """One block over whole windows, `at_once` rows of each at a time; also the keys and values it made."""
    batch, length, width = x.shape
    if length <= at_once:
        q, k, v = block.project(x, tables)
        return block.finish(x, attend_whole(q, k, v)), k, v
    keys, values = x.new_empty(2, batch, block.heads, length, width // block.heads)
    finished = torch.empty_like(x)
    for start in range(0, length, at_once):
        rows = slice(start, min(start + at_once, length))
        q, keys[:, :, rows], values[:, :, rows] = block.project(
            x[:, rows], (tables[0][:, :, rows], tables[1][:, :, rows])
        )
        mask = window_mask(start, rows.stop - start, x) if start else None
        attended = attend_whole(q, keys[:, :, : rows.stop], values[:, :, : rows.stop], mask)
        finished[:, rows] = block.finish(x[:, rows], attended)
    return finished, keys, values
