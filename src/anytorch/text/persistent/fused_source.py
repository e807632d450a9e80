# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""The kernels of a step in Triton: products with what stands before and behind them, and attention with all it needs.

A step of few texts reads every weight once and computes next to nothing with it. So each kernel is one reading of one
matrix; norms, biases, gates and residuals ride on it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x, weight, second, bias, second_bias, norm, residual, out, parts, arrived, rows, columns, weight_row,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, GATED: tl.constexpr, DOT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = x [rows, WIDTH] · weight [columns, WIDTH]ᵀ; rows of a weight lie `weight_row` numbers apart.

    NORM: the root-mean-square norm of x comes first. Its factor is one number per row, so it is applied at the end; not
    with DOT, whose factors are float16 perhaps, too small for x times the norm's weights. GATED: silu of the product is
    multiplied by the one with `second`. SPLITS above 1: each sums SHARE of the WIDTH columns (a multiple of BLOCK_K);
    `parts` holds what they find, `arrived` (zeros) counts them per tile, and who comes last adds them in order.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_ok = n < columns
    m_ok = m < rows
    begin = 0
    end = WIDTH
    if SPLITS > 1:
        begin = tl.program_id(2) * SHARE
        end = tl.minimum(begin + SHARE, WIDTH)
    rows_of = n[:, None].to(tl.int64) * weight_row
    where = m[:, None].to(tl.int64) * columns + n[None, :]
    inside = m_ok[:, None] & n_ok[None, :]
    added = tl.zeros((BLOCK_N,), tl.float32)
    added_2 = tl.zeros((BLOCK_N,), tl.float32)
    before = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Asked for before the weights, so that nobody waits for it behind them.
    if BIAS:
        added = tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
        if GATED:
            added_2 = tl.load(second_bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        before = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    if DOT:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        total_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
        total_2 = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        k_ok = k < WIDTH
        value = tl.load(x + m[:, None] * WIDTH + k[None, :], mask=m_ok[:, None] & k_ok[None, :], other=0.0)
        if not DOT:
            value = value.to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + k, mask=k_ok, other=0.0)[None, :]
        ok = n_ok[:, None] & k_ok[None, :]
        own = tl.load(weight + rows_of + k[None, :], mask=ok, other=0.0)
        if DOT:
            total = tl.dot(value, tl.trans(own), total)
        else:
            total += value[:, None, :] * own.to(tl.float32)[None, :, :]
        if GATED:
            other = tl.load(second + rows_of + k[None, :], mask=ok, other=0.0)
            if DOT:
                total_2 = tl.dot(value, tl.trans(other), total_2)
            else:
                total_2 += value[:, None, :] * other.to(tl.float32)[None, :, :]
    if DOT:
        result = total
        result_2 = total_2
    else:
        result = tl.sum(total, 2)
        result_2 = tl.sum(total_2, 2)
    length = tl.sum(squares, 1)
    if SPLITS == 1:
        finish(out, where, inside, result, result_2, length, added, added_2, before, WIDTH, EPSILON, NORM, GATED)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        row = tl.arange(0, BLOCK_M)
        place = row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        size = BLOCK_M * BLOCK_N
        room = 2 * size + BLOCK_M  # of one split: both sums, and the squares
        mine = parts + (tile * SPLITS + tl.program_id(2)) * room
        tl.store(mine + place, result)
        if GATED:
            tl.store(mine + size + place, result_2)
        if NORM:
            tl.store(mine + 2 * size + row, length)
        tl.debug_barrier()  # all threads' parts are written before this program is counted
        ticket = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if ticket == SPLITS - 1:
            tl.store(arrived + tile, 0)
            all_of = parts + tile * SPLITS * room
            result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            result_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            length = tl.zeros((BLOCK_M,), tl.float32)
            for split in tl.static_range(SPLITS):
                result += tl.load(all_of + split * room + place, volatile=True)
                if GATED:
                    result_2 += tl.load(all_of + split * room + size + place, volatile=True)
                if NORM:
                    length += tl.load(all_of + split * room + 2 * size + row, volatile=True)
            finish(out, where, inside, result, result_2, length, added, added_2, before, WIDTH, EPSILON, NORM, GATED)


@triton.jit
def finish(
    out, where, inside, result, result_2, length, added, added_2, before,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Compute what stands behind the product, and write it; `length` is the sum of x's squares, one per row."""
    if NORM:
        factor = (1.0 / tl.sqrt(length / WIDTH + EPSILON))[:, None]
        result = result * factor
        result_2 = result_2 * factor
    result += added[None, :]
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * (result_2 + added_2[None, :])
    tl.store(out + where, (result + before).to(out.dtype.element_ty), mask=inside)


@triton.jit
def normed(x, weight, out, WIDTH: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr):
    """The root-mean-square norm of x [rows, WIDTH]: grid [rows]."""
    k = tl.arange(0, BLOCK)
    at = tl.program_id(0) * WIDTH + k
    weights = tl.load(weight + k, mask=k < WIDTH, other=0.0)
    value = tl.load(x + at, mask=k < WIDTH, other=0.0).to(tl.float32)
    value = value / tl.sqrt(tl.sum(value * value, 0) / WIDTH + EPSILON)
    tl.store(out + at, (value.to(out.dtype.element_ty) * weights).to(out.dtype.element_ty), mask=k < WIDTH)


@triton.jit
def attend(
    qkv, cos, sin, q_norm, k_norm, places, keys, values, out, parts, most_of, sum_of,
    row_stride, head_stride, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, EPSILON: tl.constexpr,
    NORMED: tl.constexpr, WINDOWED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention of each row's new token, whose key and value are kept: grid [KV_HEADS, SPLITS, rows].

    qkv [rows, (HEADS + 2 KV_HEADS) · 2 HALF] come from their product as they are; norms and rotation are done here. keys and
    values are [rows, KV_HEADS, positions, 2 HALF]. Heads are in two halves, since rotation turns one against the other.
    SPLITS above 1: `parts`, `most_of` and `sum_of` get what each part of the context gives, for `join`.
    """
    kv = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    HEAD: tl.constexpr = 2 * HALF
    ROWS: tl.constexpr = 16  # of the matrix unit; heads that share keys are its first
    kind = keys.dtype.element_ty
    place = tl.load(places + row)
    d = tl.arange(0, HALF)
    g = tl.arange(0, ROWS)
    g_ok = g < GROUP
    turn = tl.load(cos + place * HALF + d)
    lift = tl.load(sin + place * HALF + d)
    base = qkv + row * (HEADS + 2 * KV_HEADS) * HEAD
    at = base + (kv * GROUP + g)[:, None] * HEAD + d[None, :]
    left = tl.load(at, mask=g_ok[:, None], other=0.0).to(tl.float32)
    right = tl.load(at + HALF, mask=g_ok[:, None], other=0.0).to(tl.float32)
    if NORMED:
        factor = 1.0 / tl.sqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD + EPSILON)
        left = (left * factor[:, None]).to(kind).to(tl.float32) * tl.load(q_norm + d)[None, :]
        right = (right * factor[:, None]).to(kind).to(tl.float32) * tl.load(q_norm + HALF + d)[None, :]
    q_left = (left * turn[None, :] - right * lift[None, :]).to(kind)
    q_right = (right * turn[None, :] + left * lift[None, :]).to(kind)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed_left = tl.zeros((ROWS, HALF), tl.float32)
    mixed_right = tl.zeros((ROWS, HALF), tl.float32)
    own = row.to(tl.int64) * row_stride + kv * head_stride
    if split == 0:  # the new token itself
        at_key = base + (HEADS + kv) * HEAD + d
        k_left = tl.load(at_key).to(tl.float32)
        k_right = tl.load(at_key + HALF).to(tl.float32)
        if NORMED:
            k_factor = 1.0 / tl.sqrt((tl.sum(k_left * k_left, 0) + tl.sum(k_right * k_right, 0)) / HEAD + EPSILON)
            k_left = (k_left * k_factor).to(kind).to(tl.float32) * tl.load(k_norm + d)
            k_right = (k_right * k_factor).to(kind).to(tl.float32) * tl.load(k_norm + HALF + d)
        new_left = (k_left * turn - k_right * lift).to(kind)
        new_right = (k_right * turn + k_left * lift).to(kind)
        at_value = base + (HEADS + KV_HEADS + kv) * HEAD + d
        v_left = tl.load(at_value)
        v_right = tl.load(at_value + HALF)
        kept = own + place * HEAD + d
        tl.store(keys + kept, new_left)
        tl.store(keys + kept + HALF, new_right)
        tl.store(values + kept, v_left)
        tl.store(values + kept + HALF, v_right)
        most = tl.sum(q_left.to(tl.float32) * new_left.to(tl.float32)[None, :], 1)
        most = (most + tl.sum(q_right.to(tl.float32) * new_right.to(tl.float32)[None, :], 1)) * scale
        total += 1.0
        mixed_left += v_left.to(tl.float32)[None, :]
        mixed_right += v_right.to(tl.float32)[None, :]
    begin = place * 0
    if WINDOWED:
        begin = tl.maximum(place + 1 - window, 0)
    share = tl.cdiv(tl.cdiv(place - begin, SPLITS), BLOCK) * BLOCK
    begin += split * share
    end = tl.minimum(begin + share, place)
    for start in tl.range(begin, end, BLOCK):
        p = start + tl.arange(0, BLOCK)
        p_ok = p < end
        here = own + p[:, None] * HEAD + d[None, :]
        old_left = tl.load(keys + here, mask=p_ok[:, None], other=0.0)
        old_right = tl.load(keys + here + HALF, mask=p_ok[:, None], other=0.0)
        score = tl.dot(q_left, tl.trans(old_left))
        score = tl.dot(q_right, tl.trans(old_right), score) * scale
        score = tl.where(p_ok[None, :], score, float("-inf"))
        higher = tl.maximum(most, tl.max(score, 1))
        by = tl.exp(most - higher)
        share_of = tl.exp(score - higher[:, None])
        total = total * by + tl.sum(share_of, 1)
        share_of = share_of.to(kind)
        mixed_left = tl.dot(share_of, tl.load(values + here, mask=p_ok[:, None], other=0.0), mixed_left * by[:, None])
        mixed_right = tl.dot(
            share_of, tl.load(values + here + HALF, mask=p_ok[:, None], other=0.0), mixed_right * by[:, None]
        )
        most = higher
    head = row * HEADS + kv * GROUP + g
    if SPLITS == 1:
        there = head[:, None] * HEAD + d[None, :]
        tl.store(out + there, (mixed_left / total[:, None]).to(out.dtype.element_ty), mask=g_ok[:, None])
        tl.store(out + there + HALF, (mixed_right / total[:, None]).to(out.dtype.element_ty), mask=g_ok[:, None])
    else:
        part = head * SPLITS + split
        there = part[:, None] * HEAD + d[None, :]
        tl.store(parts + there, mixed_left, mask=g_ok[:, None])
        tl.store(parts + there + HALF, mixed_right, mask=g_ok[:, None])
        tl.store(most_of + part, most, mask=g_ok)
        tl.store(sum_of + part, total, mask=g_ok)


@triton.jit
def join(parts, most_of, sum_of, out, HEAD: tl.constexpr, SPLITS: tl.constexpr):
    """Attention of a head to its whole context from that to the parts: grid [rows · heads]."""
    head = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, HEAD)
    most = tl.load(most_of + head * SPLITS + s)
    total = tl.load(sum_of + head * SPLITS + s)
    mixed = tl.load(parts + (head * SPLITS + s)[:, None] * HEAD + d[None, :])
    by = tl.exp(most - tl.max(most, 0))  # 0 for a part without a position: split 0 always has one
    result = tl.sum(mixed * by[:, None], 0) / tl.sum(total * by, 0)
    tl.store(out + head * HEAD + d, result.to(out.dtype.element_ty))
