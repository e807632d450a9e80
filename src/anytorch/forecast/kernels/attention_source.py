# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""The attention in Triton of one generated row of every sample, and of full windows.

Of one row: positions, cache and softmax in one kernel. `attend` lets a few samples read the prompt together, `attend_many`
all of them on the matrix units. Which of them is faster depends on how many samples there are, so it is measured
(`forecast.kernels.choice`).

Of full windows (`attend_window`): own rows of every sample to the history they share, and to themselves. torch's attention
wants the shared keys beside each sample's own, laid out once per sample; here they are read where they lie, and q and k are
turned to their positions on the way in.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def online_softmax(score, most, total, AXIS: tl.constexpr):
    """A block's scores, and the highest score and the sum of weights so far → weights, fade, and both of these anew.

    AXIS is the keys'. What was mixed so far is worth `fade` times itself: mixed * fade + weight · value.
    """
    higher = tl.maximum(most, tl.max(score, AXIS))
    fade = tl.exp(most - higher)
    weight = tl.exp(score - (higher if AXIS == 0 else higher[:, None]))
    return weight, fade, higher, total * fade + tl.sum(weight, AXIS)


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
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value[None, :, :], 1)
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
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = mixed * fade[:, None] + tl.sum(weight[:, :, None] * value, 1)
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
def attend_many(
    qkv, cos, sin, table_kind, table_series, keys, values, own_keys, own_values, out, part, part_most, part_sum, arrived,
    counters, lengths, samples, longest, capacity, max_context,
    HEADS: tl.constexpr, HEAD: tl.constexpr, TILE: tl.constexpr, EVICT: tl.constexpr, SAMPLES: tl.constexpr,
    BLOCK: tl.constexpr, OWN_BLOCK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same as `attend`: the prompt is read once for all samples (SPLITS programs), own rows by one program each.

    SAMPLES is a power of two, at least 16, not below `samples`. The last program of a head puts all parts together.
    """
    head = tl.program_id(0)
    series = tl.program_id(1)
    work = tl.program_id(2)  # the prompt's parts come first: they take longest
    at = tl.load(counters).to(tl.int32)
    length = tl.load(lengths + series).to(tl.int32)
    column = tl.arange(0, TILE)
    column_ok = column < HEAD
    swapped = tl.where(column < HEAD // 2, column + HEAD // 2, column - HEAD // 2)
    place = series * table_series + at * HEAD + column
    cos_q = tl.load(cos + place, mask=column_ok, other=0.0)
    sin_q = tl.load(sin + place, mask=column_ok, other=0.0)
    cos_k = tl.load(cos + table_kind + place, mask=column_ok, other=0.0)
    sin_k = tl.load(sin + table_kind + place, mask=column_ok, other=0.0)
    width = HEADS * HEAD
    new = qkv + series * samples * (3 * width) + head * HEAD
    first_state = (series * HEADS + head) * ((SPLITS + 1) * SAMPLES)  # [series, heads, parts, samples]
    if work < SPLITS:
        prompt = (series * HEADS + head) * longest * HEAD
        first = length + at + 1 - max_context if EVICT else 0
        attend_prompt(
            new, cos_q, sin_q, keys + prompt, values + prompt, part, part_most, part_sum, first_state + work * SAMPLES,
            work, first, length, samples, column, column_ok, swapped, width, HEAD, TILE, SAMPLES, BLOCK, SPLITS, PRECISION,
        )  # fmt: skip
    else:
        sample = work - SPLITS
        own = ((series * HEADS + head) * samples + sample) * capacity * HEAD
        attend_own(
            new + sample * (3 * width), cos_q, sin_q, cos_k, sin_k, own_keys + own, own_values + own,
            part, part_most, part_sum, first_state + SPLITS * SAMPLES + sample, at + 1 - max_context, at,
            column, column_ok, swapped, width, HEAD, TILE, EVICT, OWN_BLOCK,
        )  # fmt: skip
    tl.debug_barrier()  # all threads' parts are written before this program is counted
    sign = arrived + series * HEADS + head
    before = tl.atomic_add(sign, 1, sem="acq_rel")
    if before == SPLITS + samples - 1:
        tl.store(sign, 0)
        every = tl.arange(0, SAMPLES)
        every_ok = every < samples
        state = first_state + every
        most = tl.full((SAMPLES,), -1e30, tl.float32)
        for other in tl.static_range(SPLITS + 1):
            found = tl.load(part_most + state + other * SAMPLES, mask=every_ok, other=-1e30, volatile=True)
            most = tl.maximum(most, found)
        total = tl.zeros((SAMPLES,), tl.float32)
        mixed = tl.zeros((SAMPLES, TILE), tl.float32)
        for other in tl.static_range(SPLITS + 1):
            there = state + other * SAMPLES
            found = tl.load(part_most + there, mask=every_ok, other=-1e30, volatile=True)
            fade = tl.exp(found - most)
            total += fade * tl.load(part_sum + there, mask=every_ok, other=1.0, volatile=True)
            mixed += fade[:, None] * tl.load(
                part + there[:, None] * TILE + column[None, :], mask=every_ok[:, None], other=0.0, volatile=True
            )
        target = out + (series * samples + every)[:, None] * width + head * HEAD + column[None, :]
        tl.store(target, mixed / total[:, None], mask=every_ok[:, None] & column_ok[None, :])


@triton.jit
def attend_prompt(
    new, cos_q, sin_q, keys, values, part, part_most, part_sum, first_state, split, first, length, samples,
    column, column_ok, swapped, width,
    HEAD: tl.constexpr, TILE: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """All samples' rows attend to one share of their prompt."""
    sample = tl.arange(0, SAMPLES)
    new_ok = (sample < samples)[:, None] & column_ok[None, :]
    rows = new + sample[:, None] * (3 * width)
    q = tl.load(rows + column[None, :], mask=new_ok, other=0.0) * cos_q[None, :]
    q += tl.load(rows + swapped[None, :], mask=new_ok, other=0.0) * sin_q[None, :]
    most = tl.full((SAMPLES,), -1e30, tl.float32)
    total = tl.zeros((SAMPLES,), tl.float32)
    mixed = tl.zeros((SAMPLES, TILE), tl.float32)
    share = (length + SPLITS - 1) // SPLITS
    end = tl.minimum(length, (split + 1) * share)
    for start in tl.range(split * share, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        ok = (j < end) & (j >= first)
        at_key = j[:, None] * HEAD + column[None, :]
        key = tl.load(keys + at_key, mask=ok[:, None] & column_ok[None, :], other=0.0)
        value = tl.load(values + at_key, mask=ok[:, None] & column_ok[None, :], other=0.0)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        score = tl.where(ok[None, :], score, float("-inf"))
        weight, fade, most, total = online_softmax(score, most, total, 1)
        mixed = tl.dot(weight, value, mixed * fade[:, None], input_precision=PRECISION)
    state = first_state + sample
    tl.store(part + state[:, None] * TILE + column[None, :], mixed)
    tl.store(part_most + state, most)
    tl.store(part_sum + state, total)


@triton.jit
def attend_own(
    new, cos_q, sin_q, cos_k, sin_k, own_keys, own_values, part, part_most, part_sum, state, first, at,
    column, column_ok, swapped, width,
    HEAD: tl.constexpr, TILE: tl.constexpr, EVICT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sample's row is kept, and attends to itself and to the sample's rows before it."""
    q = tl.load(new + column, mask=column_ok, other=0.0) * cos_q
    q += tl.load(new + swapped, mask=column_ok, other=0.0) * sin_q
    k = tl.load(new + width + column, mask=column_ok, other=0.0) * cos_k
    k += tl.load(new + width + swapped, mask=column_ok, other=0.0) * sin_k
    v = tl.load(new + 2 * width + column, mask=column_ok, other=0.0)
    tl.store(own_keys + at * HEAD + column, k, mask=column_ok)
    tl.store(own_values + at * HEAD + column, v, mask=column_ok)
    most = tl.sum(q * k, 0)
    total = tl.exp(most - most)
    mixed = v
    for start in tl.range(0, at, BLOCK):
        j = start + tl.arange(0, BLOCK)
        ok = j < at
        if EVICT:
            ok = ok & (j >= first)
        at_key = j[:, None] * HEAD + column[None, :]
        key = tl.load(own_keys + at_key, mask=ok[:, None] & column_ok[None, :], other=0.0)
        value = tl.load(own_values + at_key, mask=ok[:, None] & column_ok[None, :], other=0.0)
        score = tl.where(ok, tl.sum(key * q[None, :], 1), float("-inf"))
        weight, fade, most, total = online_softmax(score, most, total, 0)
        mixed = mixed * fade + tl.sum(weight[:, None] * value, 0)
    tl.store(part + state * TILE + column, mixed)
    tl.store(part_most + state, most)
    tl.store(part_sum + state, total)


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
