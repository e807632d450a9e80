"""Multiplying with ordinary matrices: unpacked a few rows at a time, or kept unpacked beside the packed weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from anytorch.quant.kernels import cpp
from anytorch.quant.kernels.base import Kernel, Prepared, nbytes_of
from anytorch.quant.tensor import QuantTensor, unpack

SCRATCH_NBYTES = 4 << 20  # of float32 weights at a time: stays in a core's cache between unpacking and multiplying


def chunks(weight: QuantTensor, dtype: torch.dtype) -> Iterator[tuple[int, torch.Tensor]]:
    """Rows of the weight, unpacked, as (first row, matrix). The matrix is overwritten by the next one.

    On the CPU with our library: a few rows at a time, so that a layer's float32 weight never exists whole. Elsewhere the
    weight is unpacked in one go, because launches cost more there than memory does.
    """
    rows, columns = weight.rows, weight.columns
    if weight.device.type != "cpu" or not cpp.available():
        yield 0, unpack(weight, dtype).reshape(rows, columns)
        return
    described = cpp.describe(weight)
    count = max(16, min(rows, SCRATCH_NBYTES // (4 * columns)))
    scratch = torch.empty(count, columns)
    for first in range(0, rows, count):
        part = scratch[: min(count, rows - first)]
        cpp.unpack_rows(weight, first, part.shape[0], part, described)
        yield first, part.to(dtype)


def multiply(weight: QuantTensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (m × columns) times the weight's transpose, plus bias, through `chunks`."""
    out: torch.Tensor | None = None
    for first, part in chunks(weight, x.dtype):
        last = first + part.shape[0]
        if part.shape[0] == weight.rows:
            return functional.linear(x, part, bias)
        if out is None:
            out = x.new_empty(x.shape[0], weight.rows)
        out[:, first:last] = functional.linear(x, part, None if bias is None else bias[first:last])
    assert out is not None
    return out


def input_gradient(weight: QuantTensor, gradient: torch.Tensor) -> torch.Tensor:
    """gradient (m × rows) times the weight: what flows back to the inputs."""
    total = gradient.new_zeros(gradient.shape[0], weight.columns)
    for first, part in chunks(weight, gradient.dtype):
        total.addmm_(gradient[:, first : first + part.shape[0]], part)
    return total


class Unpacking(Kernel):
    name = "unpack, then multiply"

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        return Prepared(lambda x: multiply(weight, x, bias))


class Kept(Kernel):
    """The unpacked weight beside the packed one: as fast as an ordinary layer, at an ordinary layer's price."""

    name = "kept unpacked"

    def bind(self, weight: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Prepared:
        full = unpack(weight, dtype).reshape(weight.rows, weight.columns)
        return Prepared(lambda x: functional.linear(x, full, bias), nbytes_of(full))


KEPT = Kept()
KERNELS = (Unpacking(), KEPT)
