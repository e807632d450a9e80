"""The Triton kernels. Imported only where Triton is; `anytorch.quant.kernels.triton` launches them.

One program computes a tile of outputs and reads each packed word once. Its codes belong to neighbouring columns, so the
inputs are read with a stride instead of putting the codes in order: Σ low·x_even + Σ high·x_odd.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scales(pointer, values, index, mask, BYTE_SCALES: tl.constexpr):
    stored = tl.load(pointer + index, mask=mask, other=0)
    if BYTE_SCALES:
        return tl.load(values + stored.to(tl.int32))
    return stored.to(tl.float32)


@triton.jit
def _weights(code, table, TABLE: tl.constexpr, SHIFT: tl.constexpr):
    if TABLE:
        return tl.load(table + code.to(tl.int32))
    return code.to(tl.float32) - SHIFT


@triton.jit
def _words(
    x, codes, scale, offset, scale_values, table, n, n_ok, m, start,
    COLUMNS: tl.constexpr, ROW_WORDS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr, E2M1: tl.constexpr, BYTE_SCALES: tl.constexpr,
    OFFSET: tl.constexpr, FULL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """What BLOCK_G groups, from group `start` on, add to BLOCK_N outputs. FULL: no row and no word is beyond the end."""
    places: tl.constexpr = 32 // BITS
    words: tl.constexpr = GROUP // places
    word = start * words + tl.arange(0, BLOCK_G * words)
    at = codes + n[:, None].to(tl.int64) * ROW_WORDS + word[None, :]
    if FULL:
        packed = tl.load(at)
    else:
        packed = tl.load(at, mask=n_ok[:, None] & (word < ROW_WORDS)[None, :], other=0)
    products = tl.zeros((BLOCK_N, BLOCK_G * words), tl.float32)
    sums = tl.zeros((BLOCK_G * words,), tl.float32)
    for place in tl.static_range(places):
        k = word * places + place
        if FULL:
            xs = tl.load(x + m * COLUMNS + k).to(tl.float32)
        else:
            xs = tl.load(x + m * COLUMNS + k, mask=k < COLUMNS, other=0.0).to(tl.float32)
        if BITS == 8:
            w = ((packed << (24 - 8 * place)) >> 24).to(tl.float32)
        elif E2M1:
            # Sign, exponent and mantissa where float32 has them: the value times 2^-126, the smallest ones subnormal.
            code = packed >> (BITS * place)
            w = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        elif TABLE:
            w = tl.load(table + ((packed >> (BITS * place)) & ((1 << BITS) - 1)))
        else:
            # The code as the highest bits of the mantissa of a number in [1, 2), 1 + code / 2^BITS: one shift and one
            # logical operation, where a conversion would take a unit that has a quarter of the lanes.
            if BITS * (place + 1) <= 23:
                moved = packed << (23 - BITS * (place + 1))
            else:
                moved = packed >> (BITS * (place + 1) - 23)
            w = ((moved & (((1 << BITS) - 1) << (23 - BITS))) | 0x3F800000).to(tl.float32, bitcast=True)
        products += w * xs[None, :]
        sums += xs
    if WHOLE:
        return tl.sum(products, 1)
    part = tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_G, words)), 2)
    inputs = tl.sum(tl.reshape(sums, (BLOCK_G, words)), 1)
    if BITS < 8 and not TABLE:
        part = (part - inputs[None, :]) * (1 << BITS) - SHIFT * inputs[None, :]
    g = start + tl.arange(0, BLOCK_G)
    ok = n_ok[:, None] & (g < GROUPS)[None, :]
    where = n[:, None] * GROUPS + g[None, :]
    part *= _scales(scale, scale_values, where, ok, BYTE_SCALES)
    if OFFSET:
        part += _scales(offset, scale_values, where, ok, BYTE_SCALES) * inputs[None, :]
    return tl.sum(part, 1)


@triton.jit
def few_rows(
    x, codes, scale, offset, scale_values, table, unit, bias, out, rows,
    COLUMNS: tl.constexpr, ROW_WORDS: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr, E2M1: tl.constexpr, BYTE_SCALES: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, UNROLL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One row of x per program row: sums in float32, no tensor cores. Reading the weight once is all the work there is.

    Codes are read as 32-bit words, four at a time. A thread has the same words of several rows of the weight, so that the
    inputs, which lie `places` apart, are read once for all of them. WHOLE: one scale for a row, and GROUP is only a width.
    EVEN: rows and columns fill all tiles but the last in a row.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1).to(tl.int64)
    n_ok = n < rows
    total = tl.zeros((BLOCK_N,), tl.float32)
    words: tl.constexpr = GROUP * BITS // 32
    last: tl.constexpr = ROW_WORDS // (words * BLOCK_G) * BLOCK_G if EVEN else 0  # groups in full tiles
    if UNROLL:
        for start in tl.static_range(0, last, BLOCK_G):
            total += _words(
                x, codes, scale, offset, scale_values, table, n, n_ok, m, start, COLUMNS, ROW_WORDS, GROUPS, BITS, GROUP,
                WHOLE, SHIFT, TABLE, E2M1, BYTE_SCALES, OFFSET, True, BLOCK_N, BLOCK_G,
            )  # fmt: skip
    else:
        for start in range(0, last, BLOCK_G):
            total += _words(
                x, codes, scale, offset, scale_values, table, n, n_ok, m, start, COLUMNS, ROW_WORDS, GROUPS, BITS, GROUP,
                WHOLE, SHIFT, TABLE, E2M1, BYTE_SCALES, OFFSET, True, BLOCK_N, BLOCK_G,
            )  # fmt: skip
    for start in range(last, GROUPS, BLOCK_G):
        total += _words(
            x, codes, scale, offset, scale_values, table, n, n_ok, m, start, COLUMNS, ROW_WORDS, GROUPS, BITS, GROUP,
            WHOLE, SHIFT, TABLE, E2M1, BYTE_SCALES, OFFSET, False, BLOCK_N, BLOCK_G,
        )  # fmt: skip
    if WHOLE:
        total *= tl.load(scale + n, mask=n_ok, other=0.0).to(tl.float32)
    total *= tl.load(unit)
    if BIAS:
        total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    tl.store(out + m * rows + n, total.to(out.dtype.element_ty), mask=n_ok)


@triton.jit(do_not_specialize=["m_rows"])
def many_rows(
    x, codes, scale, offset, scale_values, table, unit, bias, out,
    m_rows, rows, columns, groups,
    ROW_BYTES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr,
    BYTE_SCALES: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Tiles for tensor cores: weights are unpacked to the dtype of x in registers."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n_ok, m_ok = n < rows, m < m_rows
    places: tl.constexpr = 8 // BITS
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, ROW_BYTES, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        ok = (b < ROW_BYTES)[:, None] & n_ok[None, :]
        packed = tl.load(codes + n[None, :].to(tl.int64) * ROW_BYTES + b[:, None], mask=ok, other=0)
        if GROUP == 0:
            group = tl.zeros((BLOCK_B,), tl.int32)
        else:
            group = b * places // GROUP
        where = n[None, :] * groups + group[:, None]
        step = _scales(scale, scale_values, where, ok, BYTE_SCALES)
        if OFFSET:
            shift = _scales(offset, scale_values, where, ok, BYTE_SCALES)
        for place in tl.static_range(places):
            k = b * places + place
            x_at = x + m[:, None].to(tl.int64) * columns + k[None, :]
            xs = tl.load(x_at, mask=m_ok[:, None] & (k < columns)[None, :], other=0.0)
            if BITS == 8:
                w = packed.to(tl.float32) * step
            else:
                w = _weights((packed >> (BITS * place)) & ((1 << BITS) - 1), table, TABLE, SHIFT) * step
            if OFFSET:
                w += shift
            total = tl.dot(xs, w.to(xs.dtype), total, input_precision=PRECISION)
    total *= tl.load(unit)
    if BIAS:
        total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    out_at = out + m[:, None].to(tl.int64) * rows + n[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=m_ok[:, None] & n_ok[None, :])


@triton.jit
def unpack_weight(
    codes, scale, offset, scale_values, table, unit, out, rows, columns, groups,
    ROW_BYTES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr,
    BYTE_SCALES: tl.constexpr, OFFSET: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The weight itself, rows × columns, in one pass: what comes before an ordinary product of thousands of rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    places: tl.constexpr = 8 // BITS
    ok = (n < rows)[:, None] & (b < ROW_BYTES)[None, :]
    packed = tl.load(codes + n[:, None].to(tl.int64) * ROW_BYTES + b[None, :], mask=ok, other=0)
    if GROUP == 0:
        group = tl.zeros((BLOCK_B,), tl.int32)
    else:
        group = b * places // GROUP
    where = n[:, None] * groups + group[None, :]
    step = _scales(scale, scale_values, where, ok, BYTE_SCALES) * tl.load(unit)
    if OFFSET:
        shift = _scales(offset, scale_values, where, ok, BYTE_SCALES) * tl.load(unit)
    for place in tl.static_range(places):
        if BITS == 8:
            w = packed.to(tl.float32) * step
        else:
            w = _weights((packed >> (BITS * place)) & ((1 << BITS) - 1), table, TABLE, SHIFT) * step
        if OFFSET:
            w += shift
        k = b * places + place
        at = out + n[:, None].to(tl.int64) * columns + k[None, :]
        tl.store(at, w.to(out.dtype.element_ty), mask=ok & (k < columns)[None, :])
