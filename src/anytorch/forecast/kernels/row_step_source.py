# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""Kernels in Triton around a generated row: drawing both ids, and the second attention between them.

A step of few rows reads every weight once and computes next to nothing, so its price is the number of kernels and how
well each reads memory. A block is five of them: norm and q, k, v; positions, cache and attention (`kernels_attend`);
projection and sum; norm, w1, w3 and the gate; w2 and sum (`kernels_linear`). Importing these modules needs Triton;
`forecast.kernels.row_step` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from anytorch.forecast.kernels.attention_source import online_softmax


@triton.jit
def choose(
    logits, noise, row, slot, rows, temperature, top_k, top_p,
    SIZE: tl.constexpr, GREEDY: tl.constexpr, BY_RANK: tl.constexpr, BY_SUM: tl.constexpr,
):  # fmt: skip
    """The id that argmax(p / noise) over the kept ids would give, without sorting.

    The best of all ids is looked at: is it kept, that is, are few enough ids likelier? If not, nothing as unlikely as
    it is kept either, and the best of the rest is looked at. With top_p 0.9 that takes 1.1 looks.
    """
    ids = tl.arange(0, SIZE)
    level = tl.load(logits + row * SIZE + ids).to(tl.float32)
    if GREEDY:
        return tl.argmax(level, 0)
    level = level / temperature
    likely = tl.exp(level - tl.max(level, 0))
    likely = likely / tl.sum(likely, 0)
    ratio = likely / tl.load(noise + (slot * rows + row) * SIZE + ids)
    best = tl.argmax(ratio, 0)
    if BY_RANK or BY_SUM:
        limit = tl.min(level, 0) - 1.0
        looking = 1
        while looking == 1:
            best = tl.argmax(tl.where(level > limit, ratio, -1.0), 0)
            its = tl.sum(tl.where(ids == best, level, 0.0), 0)
            if BY_RANK:
                kept = tl.sum((level > its).to(tl.int32), 0) < top_k
            else:
                kept = tl.sum(tl.where(level > its, likely, 0.0), 0) <= top_p
            looking = tl.where(kept, 0, 1)
            limit = tl.where(kept, limit, its)
    return best


@triton.jit
def first_id(
    logits, noise, x, norm, last, own_context, chosen, ids, counters, rows, capacity, id_row, temperature, top_k, top_p,
    WIDTH: tl.constexpr, TILE: tl.constexpr, EPSILON: tl.constexpr, SIZE: tl.constexpr,
    GREEDY: tl.constexpr, BY_RANK: tl.constexpr, BY_SUM: tl.constexpr,
):  # fmt: skip
    """Draw s1, and keep the row's context (the model's last norm)."""
    row = tl.program_id(0)
    at = tl.load(counters)
    slot = tl.load(counters + 1)
    column = tl.arange(0, TILE)
    ok = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=ok, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, 0) / WIDTH + EPSILON)
    value = value * factor * tl.load(norm + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(last + row * WIDTH + column, value, mask=ok)
    tl.store(own_context + (row * capacity + at) * WIDTH + column, value, mask=ok)
    best = choose(logits, noise, row, slot, rows, temperature, top_k, top_p, SIZE, GREEDY, BY_RANK, BY_SUM)
    tl.store(chosen + row, best.to(tl.int64))
    tl.store(ids + row * id_row + at + 1, best.to(tl.int64))


@triton.jit
def second_id(
    logits, noise, x, s1_rows, s2_rows, future, chosen, ids, counters, rows, samples, steps, id_row,
    temperature, top_k, top_p,
    WIDTH: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
    GREEDY: tl.constexpr, BY_RANK: tl.constexpr, BY_SUM: tl.constexpr,
):  # fmt: skip
    """Draw s2, and look up the next step's input."""
    row = tl.program_id(0)
    at = tl.load(counters)
    slot = tl.load(counters + 1)
    best = choose(logits, noise, row, slot, rows, temperature, top_k, top_p, SIZE, GREEDY, BY_RANK, BY_SUM)
    tl.store(ids + row * id_row + at + 1, best.to(tl.int64))
    column = tl.arange(0, TILE)
    ok = column < WIDTH
    time = (row // samples) * steps + tl.minimum(at + 1, steps - 1)
    value = tl.load(s1_rows + tl.load(chosen + row) * WIDTH + column, mask=ok)
    value += tl.load(s2_rows + best.to(tl.int64) * WIDTH + column, mask=ok)
    value += tl.load(future + time * WIDTH + column, mask=ok)
    tl.store(x + row * WIDTH + column, value, mask=ok)


@triton.jit
def context_scores(
    queries, chosen, context, own_context, scores, counters, lengths, samples, longest, capacity, max_context,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, EVICT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """How much the chosen s1 asks for each row of the context: [rows, HEADS, longest + capacity]."""
    row = tl.program_id(0)
    series = row // samples
    at = tl.load(counters).to(tl.int32)
    length = tl.load(lengths + series).to(tl.int32)
    of_prompt = (longest + BLOCK - 1) // BLOCK
    block = tl.program_id(1)
    heads = tl.arange(0, HEADS)
    if block < of_prompt:
        j = block * BLOCK + tl.arange(0, BLOCK)
        begin = context + series * longest * WIDTH
        ok = j < length
        target = j
        if EVICT:
            ok = ok & (j >= length + at + 1 - max_context)
        there = j < longest
    else:
        j = (block - of_prompt) * BLOCK + tl.arange(0, BLOCK)
        begin = own_context + row * capacity * WIDTH
        ok = j <= at
        target = longest + j
        if EVICT:
            ok = ok & (j >= at + 1 - max_context)
        there = j <= at
    query = queries + tl.load(chosen + row) * (HEADS * WIDTH)
    total = tl.zeros((HEADS, BLOCK, BLOCK_K), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_ok = k < WIDTH
        asked = tl.load(query + heads[:, None] * WIDTH + k[None, :], mask=k_ok[None, :], other=0.0)
        row_of = tl.load(begin + j[:, None] * WIDTH + k[None, :], mask=ok[:, None] & k_ok[None, :], other=0.0)
        total += asked[:, None, :] * row_of[None, :, :]
    score = tl.where(ok[None, :], tl.sum(total, 2), float("-inf"))
    where = (row * HEADS + heads[:, None]) * (longest + capacity) + target[None, :]
    tl.store(scores + where, score, mask=there[None, :])


@triton.jit
def context_mix(
    scores, context, own_context, out, counters, samples, longest, capacity,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """softmax(scores) · context, some columns of it: [rows, HEADS, WIDTH]."""
    row = tl.program_id(0)
    series = row // samples
    at = tl.load(counters).to(tl.int32)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column_ok = column < WIDTH
    heads = tl.arange(0, HEADS)
    most = tl.full((HEADS,), -1e30, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, BLOCK_C), tl.float32)
    score_of = scores + (row * HEADS + heads[:, None]) * (longest + capacity)
    begin = context + series * longest * WIDTH
    for start in tl.range(0, longest, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = tl.load(score_of + j[None, :], mask=(j < longest)[None, :], other=float("-inf"))
        value = tl.load(
            begin + j[:, None] * WIDTH + column[None, :], mask=(j < longest)[:, None] & column_ok[None, :], other=0.0
        )
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
    begin = own_context + row * capacity * WIDTH
    for start in tl.range(0, at + 1, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = tl.load(score_of + longest + j[None, :], mask=(j <= at)[None, :], other=float("-inf"))
        value = tl.load(
            begin + j[:, None] * WIDTH + column[None, :], mask=(j <= at)[:, None] & column_ok[None, :], other=0.0
        )
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
    target = out + (row * HEADS + heads[:, None]) * WIDTH + column[None, :]
    tl.store(target, mixed / total[:, None], mask=column_ok[None, :])
