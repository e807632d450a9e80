# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""Kernels in Triton for what torch does slowly here: attention within short texts, and a norm after a sum.

A flash kernel works in tiles of 128 tokens; a sentence has 25. On an H200 it took 29 of the 66 ms that MiniLM needed for
20,000 sentences. Here a program holds one whole text and head, in a tile of 32, 64 or 128 tokens; or takes it in blocks of
64, as many as it has, so that one long text in a batch is no burden to the others. Importing this module needs Triton:
`strategy` does so only where a device states that it has it, compares the answers, and times them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

LONGEST = 128  # tokens of a text that one program can hold in a tile
BLOCK, LONGEST_IN_BLOCKS = 64, 512  # one program takes a text block by block, which for longer ones is too long a line
HEAD_WIDTHS = (16, 32, 64, 128)  # powers of two, as tiles are; 16 is the least a matrix product takes


@triton.jit
def _attention(
    q, k, v, out, starts, scale, window,
    q_token, k_token, v_token, out_token, q_head, k_head, v_head, out_head,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    text = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts + text).to(tl.int64)
    length = tl.load(starts + text + 1).to(tl.int64) - begin
    if length > 0:  # a shape has room for more texts than there are
        places = tl.arange(0, TILE)
        columns = tl.arange(0, WIDTH)
        own = places < length
        token = begin + places
        shared = head // GROUPS
        queries = tl.load(q + token[:, None] * q_token + head * q_head + columns[None, :], mask=own[:, None], other=0.0)
        keys = tl.load(k + token[:, None] * k_token + shared * k_head + columns[None, :], mask=own[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        seen = own[None, :] & (places[:, None] >= 0)
        if CAUSAL:
            seen = seen & (places[None, :] <= places[:, None])
        if WINDOWED:
            seen = seen & (tl.abs(places[None, :] - places[:, None]) <= window)
        # A query in the filling may see no key: it sees itself, so that it is not NaN; nobody reads it.
        seen = seen | (places[None, :] == places[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        total = tl.sum(weights, axis=1)
        values = tl.load(
            v + token[:, None] * v_token + shared * v_head + columns[None, :], mask=own[:, None], other=0.0
        )
        mixed = tl.dot(weights.to(values.dtype), values) / total[:, None]
        target = out + token[:, None] * out_token + head * out_head + columns[None, :]
        tl.store(target, mixed.to(out.dtype.element_ty), mask=own[:, None])


@triton.jit
def _attention_in_blocks(
    q, k, v, out, starts, scale, window,
    q_token, k_token, v_token, out_token, q_head, k_head, v_head, out_head,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """The same for texts of several blocks: as many steps as a text has, whatever the longest one of the batch is."""
    text = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts + text).to(tl.int64)
    length = tl.load(starts + text + 1) - tl.load(starts + text)
    columns = tl.arange(0, WIDTH)
    within = tl.arange(0, BLOCK)
    shared = head // GROUPS
    for first in range(0, length, BLOCK):
        rows = first + within
        token = begin + rows
        own = rows < length
        queries = tl.load(q + token[:, None] * q_token + head * q_head + columns[None, :], mask=own[:, None], other=0.0)
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        mixed = tl.zeros((BLOCK, WIDTH), tl.float32)
        low = 0
        high = length
        if CAUSAL:
            high = tl.minimum(length, first + BLOCK)
        if WINDOWED:
            low = tl.maximum(first - window, 0) // BLOCK * BLOCK
            high = tl.minimum(high, first + BLOCK + window)
        for near in range(low, high, BLOCK):
            places = near + within
            other = begin + places
            there = places < length
            at = other[None, :] * k_token + shared * k_head + columns[:, None]
            keys = tl.load(k + at, mask=there[None, :], other=0.0)
            scores = tl.dot(queries, keys) * scale
            seen = there[None, :] & (rows[:, None] >= 0)
            if CAUSAL:
                seen = seen & (places[None, :] <= rows[:, None])
            if WINDOWED:
                seen = seen & (tl.abs(places[None, :] - rows[:, None]) <= window)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            # A query that has seen no key yet: nothing is subtracted, so that it does not become NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(top - base)
            values = tl.load(
                v + other[:, None] * v_token + shared * v_head + columns[None, :], mask=there[:, None], other=0.0
            )
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
            total = total * shrink + tl.sum(weights, axis=1)
            top = higher
        target = out + token[:, None] * out_token + head * out_head + columns[None, :]
        tl.store(target, (mixed / total[:, None]).to(out.dtype.element_ty), mask=own[:, None])


def tile_for(longest: int) -> int:
    """The tile that holds a text of so many tokens.

    >>> [tile_for(n) for n in (1, 32, 33, 128)]
    [32, 32, 64, 128]
    """
    return max(32, 1 << (longest - 1).bit_length())


def fits(longest: int, head_width: int, blocks: int = 0) -> bool:
    """True if our kernels support such texts. `blocks` as in `attend_short`."""
    return longest <= (LONGEST_IN_BLOCKS if blocks else LONGEST) and head_width in HEAD_WIDTHS


def attend_short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    longest: int,
    *,
    window: int,
    causal: bool,
    blocks: int = 0,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every text within itself, as `Packed.attend`, for texts that `fits`; written to `out` if it is given.

    Where the longest has more than BLOCK tokens, `blocks` warps take each text block by block; 0: in one tile that holds
    the longest. Scores are multiplied by `scale`, 1 / sqrt(width) by default.
    """
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the features of a head lie side by side"
    tokens, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    if out is None:
        out = torch.empty((tokens, heads, width), dtype=q.dtype, device=q.device)
    strides = (
        q.stride(0), k.stride(0), v.stride(0), out.stride(0), q.stride(1), k.stride(1), v.stride(1), out.stride(1),
    )  # fmt: skip
    kinds = {"GROUPS": heads // k.shape[1], "WIDTH": width, "CAUSAL": causal, "WINDOWED": window > 0}
    grid = (starts.shape[0] - 1, heads)
    if blocks and longest > BLOCK:
        _attention_in_blocks[grid](
            q, k, v, out, starts, scale, window, *strides, BLOCK=BLOCK, num_warps=blocks, **kinds
        )
        return out
    tile = tile_for(longest)
    warps = 1 if tile * width <= 1024 else 2 if tile <= 64 else 4
    _attention[grid](q, k, v, out, starts, scale, window, *strides, TILE=tile, num_warps=warps, **kinds)
    return out


@triton.jit
def _add_norm(
    x, y, weight, bias, out, rows, width, epsilon, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None] * width + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(y + at, mask=inside, other=0.0).to(
        tl.float32
    )
    mean = tl.sum(value, axis=1) / width
    centred = tl.where(column[None, :] < width, value - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / width
    normed = centred * (1.0 / tl.sqrt(variance + epsilon))[:, None]
    normed = normed * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        normed = normed + tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
    """`norm(x + y)` in one pass, for x and y [tokens, width]; the sum is not rounded in between."""
    assert isinstance(norm, nn.LayerNorm), norm
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    add_norm_into(out, x, y, norm.weight, norm.bias, norm.eps)
    return out


def add_norm_into(out: Tensor, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> None:
    """The same with the norm's parts; out, x and y are contiguous."""
    rows, width = x.shape
    tile = triton.next_power_of_2(width)
    together = max(1, 2048 // tile)
    _add_norm[(triton.cdiv(rows, together),)](
        x, y, weight, weight if bias is None else bias, out, rows, width, epsilon,
        HAS_BIAS=bias is not None, ROWS=together, TILE=tile, num_warps=4,
    )  # fmt: skip
