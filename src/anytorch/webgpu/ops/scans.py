"""Running sums, products, extremes and log-sum-exps along a dimension."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.runtime import Runtime, open_runtime
from anytorch.gpu.wgsl.scan import BLOCK, SCANS, THREADS, WORDS, Scan, render, render_prefixes
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import contiguous, on_device
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.ops.reductions import (
    buffers,
    element_offset,
    grid,
    guarded,
    infer,
    narrowed,
    part_states,
    register_with_out,
    usable,
    word_dtype,
)
from anytorch.webgpu.ops.softmax import row_geometry
from anytorch.webgpu.pointwise import name_of
from anytorch.webgpu.tensors import aten, new_contiguous

MOST_PARTS = 512
ENOUGH_ROWS = 256  # as many workgroups keep a GPU busy; fewer rows are cut into parts


def scan(
    name: str, self: torch.Tensor, dim: int, dtypes: Sequence[torch.dtype], compute: str | None = None
) -> list[torch.Tensor]:
    """The running fold `name` of `self` along `dim`: one new contiguous tensor per dtype. The dtypes must be usable()."""
    runtime = open_runtime()
    written = [new_contiguous(self.shape, word_dtype(dtype)) for dtype in dtypes]
    if self.numel():
        _run(runtime, name, contiguous(self), row_geometry(self, dim), written, compute or _own(self.dtype))
    return [narrowed(t, dtype) for t, dtype in zip(written, dtypes, strict=True)]


def _own(dtype: torch.dtype) -> str:
    return KINDS[name_of(dtype)].compute


def _run(
    runtime: Runtime,
    name: str,
    x: torch.Tensor,
    geometry: tuple[int, int, int],
    written: Sequence[torch.Tensor],
    compute: str,
) -> None:
    rows, length, inner = geometry
    group = not runtime.adapter.software and length > 64 and rows < 16_384
    parts, chunk = split(rows, length) if group else (1, length)
    kernel = Scan(SCANS[name], name_of(x.dtype), tuple(name_of(t.dtype) for t in written), compute, group, parts > 1)
    program = runtime.programs.make(
        kernel, lambda: render(kernel), buffers=kernel.buffers, writable=kernel.writable, immediates=4 * WORDS
    )
    prefixes = [_prefixes(runtime, name, x, geometry, parts, chunk, compute)] if parts > 1 else []
    immediates = struct.pack(f"<{WORDS}I", rows, length, inner, parts, chunk, element_offset(x))
    workers = rows * parts
    launch = grid(workers if group else -(-workers // THREADS))
    runtime.dispatch(program, buffers(runtime, [x, *written, *prefixes]), immediates, *launch)


def split(rows: int, length: int) -> tuple[int, int]:
    """Parts of a row and their length, whole blocks, for rows too few to keep a GPU busy."""
    blocks = -(-length // BLOCK)
    parts = max(1, min(ENOUGH_ROWS // rows, blocks // 4, MOST_PARTS))
    chunk = -(-blocks // parts) * BLOCK
    return -(-length // chunk), chunk


def _prefixes(
    runtime: Runtime, name: str, x: torch.Tensor, geometry: tuple[int, int, int], parts: int, chunk: int, compute: str
) -> torch.Tensor:
    rows, length, inner = geometry
    view = x.view(rows // inner, length, inner)
    totals = part_states(SCANS[name], view, (1,), parts, chunk, compute)
    reducer = SCANS[name]
    program = runtime.programs.make(
        ("prefixes", reducer, compute),
        lambda: render_prefixes(reducer, compute),
        buffers=1,
        writable=1,
        immediates=8,
    )
    launch = grid(-(-rows // THREADS))
    runtime.dispatch(program, buffers(runtime, [totals]), struct.pack("<2I", rows, parts), *launch)
    return totals


def _accumulate(op: Any, name: str) -> Callable[..., Any]:
    def kernel(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        ((_, result),) = infer(op, self, dim, dtype=dtype)
        if not usable(open_runtime(), self.dtype, result):
            return fallback(op, self, dim, dtype=dtype)
        return scan(name, self, dim, [result], _own(result))[0]

    return kernel


def _extreme(op: Any, name: str) -> Callable[..., None]:
    def kernel(self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
        if not usable(open_runtime(), self.dtype, torch.int64):
            fallback(op, self, values, indices, dim)
            return
        made = scan(name, self, dim, [self.dtype, torch.int64])
        for target, value in zip((values, indices), made, strict=True):
            on_device(value, target)

    return kernel


def _logcumsumexp(self: torch.Tensor, dim: int) -> Any:
    if not self.is_floating_point() or not usable(open_runtime(), self.dtype):
        return fallback(aten._logcumsumexp.default, self, dim)
    return scan("logcumsumexp", self, dim, [self.dtype])[0]


def register(library: torch.library.Library) -> None:
    for name in ("cumsum", "cumprod"):
        op = getattr(aten, name).default
        register_with_out(library, op, _accumulate(op, name))
    for name in ("cummax", "cummin"):
        op = getattr(aten, f"_{name}_helper").default
        library.impl(op, guarded(op, _extreme(op, name)), "PrivateUse1")
    register_with_out(library, aten._logcumsumexp.default, _logcumsumexp)
