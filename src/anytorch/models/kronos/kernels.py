# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""Six kernels in Triton that compute one generated row of a few windows: what torch needs several hundred small ones for.

A step of few rows reads every weight once and computes next to nothing, so its price is the number of kernels and how
well each reads memory. A block is five of them here: norm and q, k, v; positions, cache and attention; projection and
sum; norm, w1, w3 and the gate; w2 and sum. Importing this module needs Triton; `step` launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear(
    x, weight, bias, norm, residual, out, rows, columns, x_row,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, PER_HEAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = x [rows, WIDTH] · weight [columns, WIDTH]ᵀ, with what stands before and behind it.

    NORM: the root-mean-square norm of x comes first (its factor is one number per row, so it is applied at the end).
    GATED: the weight has 2 × columns rows, and silu of the first half is multiplied by the second. PER_HEAD above 0:
    so many columns in a row share one of x's parts of WIDTH values.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_ok = n < columns
    m_ok = m < rows
    offset = 0
    if PER_HEAD > 0:
        offset = (tl.program_id(0) * BLOCK_N // PER_HEAD) * WIDTH
    if DOT:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        second = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
        second = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    where = m[:, None] * columns + n[None, :]
    inside = m_ok[:, None] & n_ok[None, :]
    # Asked for before the weights, so that nobody waits for it behind them.
    if BIAS:
        added = tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        summed = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        k_ok = k < WIDTH
        value = tl.load(x + m[:, None] * x_row + offset + k[None, :], mask=m_ok[:, None] & k_ok[None, :], other=0.0).to(
            tl.float32
        )
        if NORM:
            squares += value * value
            value = value * tl.load(norm + k, mask=k_ok, other=0.0).to(tl.float32)[None, :]
        ok = n_ok[:, None] & k_ok[None, :]
        own = tl.load(weight + n[:, None] * WIDTH + k[None, :], mask=ok, other=0.0).to(tl.float32)
        if DOT:
            total = tl.dot(value, tl.trans(own), total, input_precision=PRECISION)
        else:
            total += value[:, None, :] * own[None, :, :]
        if GATED:
            other = tl.load(weight + (n[:, None] + columns) * WIDTH + k[None, :], mask=ok, other=0.0).to(tl.float32)
            if DOT:
                second = tl.dot(value, tl.trans(other), second, input_precision=PRECISION)
            else:
                second += value[:, None, :] * other[None, :, :]
    if DOT:
        result = total
        result_2 = second
    else:
        result = tl.sum(total, 2)
        result_2 = tl.sum(second, 2)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 1) / WIDTH + EPSILON)
        result = result * factor[:, None]
        result_2 = result_2 * factor[:, None]
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * result_2
    if BIAS:
        result += added[None, :]
    if RESIDUAL:
        result += summed
    tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend(
    qkv, cos, sin, table_kind, table_series, keys, values, own_keys, own_values, out, part, part_most, part_sum, arrived,
    counters, lengths, samples, longest, capacity, max_context,
    HEADS: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr, EVICT: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row of GROUP samples: turn q and k to their position, keep k and v, attend to the prompt and the own rows.

    With SPLITS the rows are divided among programs, and the last one to arrive puts their parts together, always in
    the same order.
    """
    head = tl.program_id(0)
    groups = (samples + GROUP - 1) // GROUP
    series = tl.program_id(1) // groups
    sample = (tl.program_id(1) % groups) * GROUP + tl.arange(0, GROUP)
    split = tl.program_id(2)
    sample_ok = sample < samples
    row = series * samples + sample
    at = tl.load(counters).to(tl.int32)
    length = tl.load(lengths + series).to(tl.int32)
    column = tl.arange(0, TILE)
    column_ok = column < HEAD
    swapped = tl.where(column < HEAD // 2, column + HEAD // 2, column - HEAD // 2)
    new_ok = sample_ok[:, None] & column_ok[None, :]
    width = HEADS * HEAD
    new = qkv + row[:, None] * (3 * width) + head * HEAD
    place = series * table_series + at * HEAD + column
    cos_q = tl.load(cos + place, mask=column_ok, other=0.0)
    sin_q = tl.load(sin + place, mask=column_ok, other=0.0)
    q = tl.load(new + column[None, :], mask=new_ok, other=0.0) * cos_q[None, :]
    q += tl.load(new + swapped[None, :], mask=new_ok, other=0.0) * sin_q[None, :]
    own = ((series * HEADS + head) * samples + sample) * capacity * HEAD  # where the samples' own rows begin
    most = tl.full((GROUP,), -1e30, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, TILE), tl.float32)
    if split == 0:
        cos_k = tl.load(cos + table_kind + place, mask=column_ok, other=0.0)
        sin_k = tl.load(sin + table_kind + place, mask=column_ok, other=0.0)
        k = tl.load(new + width + column[None, :], mask=new_ok, other=0.0) * cos_k[None, :]
        k += tl.load(new + width + swapped[None, :], mask=new_ok, other=0.0) * sin_k[None, :]
        v = tl.load(new + 2 * width + column[None, :], mask=new_ok, other=0.0)
        target = own[:, None] + at * HEAD + column[None, :]
        tl.store(own_keys + target, k, mask=new_ok)
        tl.store(own_values + target, v, mask=new_ok)
        most = tl.sum(q * k, 1)
        total = tl.full((GROUP,), 1.0, tl.float32)
        mixed = v
    first, first_own = 0, 0
    if EVICT:
        first = length + at + 1 - max_context
        first_own = at + 1 - max_context
    share = (length + SPLITS - 1) // SPLITS
    end = tl.minimum(length, (split + 1) * share)
    prompt = (series * HEADS + head) * longest * HEAD
    for start in tl.range(split * share, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        ok = (j < end) & (j >= first)
        at_key = prompt + j[:, None] * HEAD + column[None, :]
        key = tl.load(keys + at_key, mask=ok[:, None] & column_ok[None, :], other=0.0)
        value = tl.load(values + at_key, mask=ok[:, None] & column_ok[None, :], other=0.0)
        score = tl.sum(q[:, None, :] * key[None, :, :], 2)
        score = tl.where(ok[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
        most = higher
    share = (at + SPLITS - 1) // SPLITS
    end = tl.minimum(at, (split + 1) * share)
    for start in tl.range(split * share, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        ok = (j < end) & (j >= first_own)
        at_key = own[:, None, None] + j[None, :, None] * HEAD + column[None, None, :]
        inside = sample_ok[:, None, None] & ok[None, :, None] & column_ok[None, None, :]
        key = tl.load(own_keys + at_key, mask=inside, other=0.0)
        value = tl.load(own_values + at_key, mask=inside, other=0.0)
        score = tl.sum(q[:, None, :] * key, 2)
        score = tl.where(ok[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value, 1)
        most = higher
    target = out + row[:, None] * width + head * HEAD + column[None, :]
    if SPLITS == 1:
        tl.store(target, mixed / total[:, None], mask=new_ok)
    else:
        state = (split * tl.num_programs(1) * GROUP + tl.program_id(1) * GROUP + tl.arange(0, GROUP)) * HEADS + head
        between = tl.num_programs(1) * GROUP * HEADS
        tl.store(part + state[:, None] * TILE + column[None, :], mixed)
        tl.store(part_most + state, most)
        tl.store(part_sum + state, total)
        tl.debug_barrier()  # all threads' parts are written before this program is counted
        sign = arrived + tl.program_id(1) * HEADS + head
        before = tl.atomic_add(sign, 1, sem="acq_rel")
        if before == SPLITS - 1:
            tl.store(sign, 0)
            state -= split * between
            most = tl.full((GROUP,), -1e30, tl.float32)
            for other in tl.static_range(SPLITS):
                most = tl.maximum(most, tl.load(part_most + state + other * between, volatile=True))
            total = tl.zeros((GROUP,), tl.float32)
            mixed = tl.zeros((GROUP, TILE), tl.float32)
            for other in tl.static_range(SPLITS):
                there = state + other * between
                fade = tl.exp(tl.load(part_most + there, volatile=True) - most)
                total += fade * tl.load(part_sum + there, volatile=True)
                mixed += fade[:, None] * tl.load(part + there[:, None] * TILE + column[None, :], volatile=True)
            tl.store(target, mixed / total[:, None], mask=new_ok)


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
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
        most = higher
    begin = own_context + row * capacity * WIDTH
    for start in tl.range(0, at + 1, BLOCK):
        j = start + tl.arange(0, BLOCK)
        score = tl.load(score_of + longest + j[None, :], mask=(j <= at)[None, :], other=float("-inf"))
        value = tl.load(
            begin + j[:, None] * WIDTH + column[None, :], mask=(j <= at)[:, None] & column_ok[None, :], other=0.0
        )
        higher = tl.maximum(most, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        fade = tl.exp(most - higher)
        total = total * fade + tl.sum(weight, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
        most = higher
    target = out + (row * HEADS + heads[:, None]) * WIDTH + column[None, :]
    tl.store(target, mixed / total[:, None], mask=column_ok[None, :])
