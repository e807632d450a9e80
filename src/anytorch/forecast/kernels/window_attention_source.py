# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""The attention of full windows in Triton: own rows of every sample to the history they share, and to themselves.

torch's attention wants the shared keys beside each sample's own, laid out once per sample; here they are read where they
lie, and q and k are turned to their positions on the way in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anytorch.forecast.kernels.softmax_source import online_softmax


@triton.jit
def attend_window(
    qkv, cos, sin, keys, values, out, counters, series, samples, shared_rows, own_rows, max_context, scale,
    HEADS: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [series × samples × own_rows, width] from qkv [the same, 3 × width].

    `counters` holds the window's number and how many of its rows are the samples' own; the others are history, whose
    keys and values are prepared: [windows, series, HEADS, shared_rows, HEAD].
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)  # of series × samples
    window = tl.load(counters).to(tl.int32)
    before = max_context - tl.load(counters + 1).to(tl.int32)  # rows of history
    width = HEADS * HEAD
    column = tl.arange(0, TILE)
    column_ok = column < HEAD
    swapped = tl.where(column < HEAD // 2, column + HEAD // 2, column - HEAD // 2)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    m_ok = (m < own_rows)[:, None] & column_ok[None, :]
    own = qkv + row * own_rows * (3 * width) + head * HEAD
    place = (before + m)[:, None] * HEAD + column[None, :]
    mine = own + m[:, None] * (3 * width)
    q = tl.load(mine + column[None, :], mask=m_ok, other=0.0) * tl.load(cos + place, mask=m_ok, other=0.0)
    q += tl.load(mine + swapped[None, :], mask=m_ok, other=0.0) * tl.load(sin + place, mask=m_ok, other=0.0)
    q = q * scale
    most = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, TILE), tl.float32)
    prepared = ((window * series + row // samples) * HEADS + head).to(tl.int64) * shared_rows * HEAD
    for start in tl.range(0, before, BLOCK_N, num_stages=STAGES):
        j = start + tl.arange(0, BLOCK_N)
        ok = (j < before)[:, None] & column_ok[None, :]
        at = prepared + j[:, None] * HEAD + column[None, :]
        key = tl.load(keys + at, mask=ok, other=0.0)
        value = tl.load(values + at, mask=ok, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        score = tl.where((j < before)[None, :], score, float("-inf"))
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = tl.dot(weight, value, mixed * fade[:, None], input_precision=PRECISION)
    for start in tl.range(0, tl.minimum((block + 1) * BLOCK_M, own_rows), BLOCK_N, num_stages=STAGES):
        j = start + tl.arange(0, BLOCK_N)
        ok = (j < own_rows)[:, None] & column_ok[None, :]
        theirs = own + j[:, None] * (3 * width) + width
        their_place = (before + j)[:, None] * HEAD + column[None, :]
        key = tl.load(theirs + column[None, :], mask=ok, other=0.0) * tl.load(cos + their_place, mask=ok, other=0.0)
        key += tl.load(theirs + swapped[None, :], mask=ok, other=0.0) * tl.load(sin + their_place, mask=ok, other=0.0)
        value = tl.load(theirs + width + column[None, :], mask=ok, other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        score = tl.where((j[None, :] <= m[:, None]) & (j < own_rows)[None, :], score, float("-inf"))
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = tl.dot(weight, value, mixed * fade[:, None], input_precision=PRECISION)
    target = out + (row * own_rows + m)[:, None] * width + head * HEAD + column[None, :]
    tl.store(target, mixed / total[:, None], mask=m_ok)
