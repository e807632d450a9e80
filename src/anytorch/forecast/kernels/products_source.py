# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-any-return"
"""A linear layer of few rows in Triton, with what stands before and behind it, and its sum divided among programs.

Few rows make few tiles, each a long chain of small products, and most of the device waits. With SPLITS the columns of the
weight are divided, and the program that arrives last puts the parts together, always in the same order: the answer does
not depend on who that is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear(
    x, weight, bias, norm, residual, out, part, arrived, rows, columns, x_row,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    GATED: tl.constexpr, PER_HEAD: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = x [rows, WIDTH] · weight [columns, WIDTH]ᵀ, with what stands before and behind it.

    NORM: the root-mean-square norm of x comes first (its factor is one number per row, so it is applied at the end).
    GATED: the weight has 2 × columns rows, and silu of the first half is multiplied by the second. PER_HEAD above 0:
    so many columns in a row share one of x's parts of WIDTH values. SPLITS above 1: each of them sums SHARE of the
    WIDTH columns (a multiple of BLOCK_K), `part` holds what they find, and `arrived` (zeros) counts them per tile.
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
    added = tl.zeros((BLOCK_N,), tl.float32)
    summed = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Asked for before the weights, so that nobody waits for it behind them.
    if BIAS:
        added = tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        summed = tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    begin = 0
    end = WIDTH
    if SPLITS > 1:
        begin = tl.program_id(2) * SHARE
        end = tl.minimum(begin + SHARE, WIDTH)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
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
    length = tl.sum(squares, 1)
    if SPLITS == 1:
        finish(out, where, inside, result, result_2, length, added, summed, WIDTH, EPSILON, NORM, GATED, BIAS, RESIDUAL)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        row = tl.arange(0, BLOCK_M)
        place = row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        size = BLOCK_M * BLOCK_N
        room = 2 * size + BLOCK_M  # of one split: both sums, and the squares
        mine = part + (tile * SPLITS + tl.program_id(2)) * room
        tl.store(mine + place, result)
        if GATED:
            tl.store(mine + size + place, result_2)
        if NORM:
            tl.store(mine + 2 * size + row, length)
        tl.debug_barrier()  # all threads' parts are written before this program is counted
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == SPLITS - 1:
            tl.store(arrived + tile, 0)
            all_of = part + tile * SPLITS * room
            result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            result_2 = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            length = tl.zeros((BLOCK_M,), tl.float32)
            for split in tl.static_range(SPLITS):
                result += tl.load(all_of + split * room + place, volatile=True)
                if GATED:
                    result_2 += tl.load(all_of + split * room + size + place, volatile=True)
                if NORM:
                    length += tl.load(all_of + split * room + 2 * size + row, volatile=True)
            finish(
                out, where, inside, result, result_2, length, added, summed, WIDTH, EPSILON, NORM, GATED, BIAS, RESIDUAL
            )


@triton.jit
def finish(
    out, where, inside, result, result_2, length, added, summed,
    WIDTH: tl.constexpr, EPSILON: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute what stands behind the product, and write it; `length` is the sum of x's squares, one per row."""
    if NORM:
        factor = 1.0 / tl.sqrt(length / WIDTH + EPSILON)
        result = result * factor[:, None]
        result_2 = result_2 * factor[:, None]
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * result_2
    if BIAS:
        result += added[None, :]
    if RESIDUAL:
        result += summed
    tl.store(out + where, result.to(out.dtype.element_ty), mask=inside)
