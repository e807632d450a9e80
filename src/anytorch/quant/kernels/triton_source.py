"""The Triton kernels. Imported only where Triton is; `anytorch.quant.kernels.triton` launches them.

One program computes a tile of outputs and reads each packed byte once. A byte's codes belong to neighbouring columns, so
the inputs are read with a stride instead of putting the codes in order: Σ low·x_even + Σ high·x_odd.
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
def few_rows(
    x, codes, scale, offset, scale_values, table, unit, bias, out,
    rows, columns, groups,
    ROW_BYTES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, TABLE: tl.constexpr,
    BYTE_SCALES: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One row of x per program row: sums in float32, no tensor cores."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1)
    n_ok = n < rows
    places: tl.constexpr = 8 // BITS
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, ROW_BYTES, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        ok = n_ok[:, None] & (b < ROW_BYTES)[None, :]
        packed = tl.load(codes + n[:, None].to(tl.int64) * ROW_BYTES + b[None, :], mask=ok, other=0)
        if GROUP == 0:
            group = tl.zeros((BLOCK_B,), tl.int32)
        else:
            group = b * places // GROUP
        where = n[:, None] * groups + group[None, :]
        step = _scales(scale, scale_values, where, ok, BYTE_SCALES)
        products = tl.zeros((BLOCK_N, BLOCK_B), tl.float32)
        sums = tl.zeros((BLOCK_B,), tl.float32)
        for place in tl.static_range(places):
            k = b * places + place
            xs = tl.load(x + m.to(tl.int64) * columns + k, mask=k < columns, other=0.0).to(tl.float32)
            if BITS == 8:
                w = packed.to(tl.float32)
            else:
                w = _weights((packed >> (BITS * place)) & ((1 << BITS) - 1), table, TABLE, SHIFT)
            products += w * xs[None, :]
            sums += xs
        part = products * step
        if OFFSET:
            part += _scales(offset, scale_values, where, ok, BYTE_SCALES) * sums[None, :]
        total += tl.sum(tl.where(ok, part, 0.0), 1)
    total *= tl.load(unit)
    if BIAS:
        total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * rows + n, total.to(out.dtype.element_ty), mask=n_ok)


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
