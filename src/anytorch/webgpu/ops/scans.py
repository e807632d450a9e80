"""Running sums, products, extremes and log-sum-exps along a dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.reduce import Reducer
from anytorch.gpu.wgsl.scan import BLOCK, SCANS, THREADS, Scan, render, render_prefixes
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import contiguous, narrowed, on_device
from anytorch.webgpu.dtypes import name_of, usable, word_dtype
from anytorch.webgpu.folds import part_states
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, infer, launch
from anytorch.webgpu.rows import row_geometry
from anytorch.webgpu.tensors import aten, new_contiguous

MOST_PARTS = 512
ENOUGH_ROWS = 256  # as many workgroups keep a GPU busy; fewer rows are cut into parts


def scan(
    name: str, self: torch.Tensor, dim: int, dtypes: Sequence[torch.dtype], compute: str | None = None
) -> list[torch.Tensor]:
    """The running fold `name` of `self` along `dim`: one new contiguous tensor per dtype. The dtypes must be usable()."""
    written = [new_contiguous(self.shape, word_dtype(dtype)) for dtype in dtypes]
    if self.numel():
        _run(name, contiguous(self), row_geometry(self, dim), written, compute or _own(self.dtype))
    return [narrowed(t, dtype) for t, dtype in zip(written, dtypes, strict=True)]


def _own(dtype: torch.dtype) -> str:
    return KINDS[name_of(dtype)].compute


def _run(
    name: str,
    x: torch.Tensor,
    geometry: tuple[int, int, int],
    written: Sequence[torch.Tensor],
    compute: str,
) -> None:
    rows, length, inner = geometry
    group = not open_runtime().adapter.software and length > 64 and rows < 16_384
    parts, chunk = split(rows, length) if group else (1, length)
    kernel = Scan(SCANS[name], name_of(x.dtype), tuple(name_of(t.dtype) for t in written), compute, group, parts > 1)
    prefixes = [_prefixes(SCANS[name], x, geometry, parts, chunk, compute)] if parts > 1 else []
    groups = rows * parts if group else -(-rows * parts // THREADS)
    numbers: dict[str, Any] = {"head": (rows, length, inner, parts, chunk), "writable": kernel.writable}
    launch(kernel, render, [x, *written, *prefixes], groups, **numbers)


def split(rows: int, length: int) -> tuple[int, int]:
    """Parts of a row and their length, whole blocks, for rows too few to keep a GPU busy."""
    blocks = -(-length // BLOCK)
    parts = max(1, min(ENOUGH_ROWS // rows, blocks // 4, MOST_PARTS))
    chunk = -(-blocks // parts) * BLOCK
    return -(-length // chunk), chunk


def _prefixes(
    reducer: Reducer, x: torch.Tensor, geometry: tuple[int, int, int], parts: int, chunk: int, compute: str
) -> torch.Tensor:
    rows, length, inner = geometry
    totals = part_states(reducer, x.view(rows // inner, length, inner), (1,), parts, chunk, compute)
    numbers: dict[str, Any] = {"head": (rows, parts), "placed": 0, "writable": 1}
    launch(("prefixes", reducer, compute), _render_prefixes, [totals], -(-rows // THREADS), **numbers)
    return totals


def _render_prefixes(kernel: tuple[str, Reducer, str]) -> str:
    return render_prefixes(kernel[1], kernel[2])


def _accumulate(op: Any, name: str) -> Callable[..., Any]:
    def kernel(self: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        result = infer(op, self, dim, dtype=dtype).dtype
        if not usable(self.dtype, result):
            raise NoKernel
        return scan(name, self, dim, [result], _own(result))[0]

    return kernel


def _extreme(name: str) -> Callable[..., None]:
    def kernel(self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
        if not usable(self.dtype, torch.int64):
            raise NoKernel
        made = scan(name, self, dim, [self.dtype, torch.int64])
        for target, value in zip((values, indices), made, strict=True):
            on_device(value, target)

    return kernel


def _logcumsumexp(self: torch.Tensor, dim: int) -> Any:
    if not self.is_floating_point() or not usable(self.dtype):
        raise NoKernel
    return scan("logcumsumexp", self, dim, [self.dtype])[0]


KERNELS: dict[str, Callable[..., Any]] = {
    "cumsum": _accumulate(aten.cumsum.default, "cumsum"),
    "cumprod": _accumulate(aten.cumprod.default, "cumprod"),
    "_cummax_helper": _extreme("cummax"),
    "_cummin_helper": _extreme("cummin"),
    "_logcumsumexp": _logcumsumexp,
}


def register(library: torch.library.Library) -> None:
    register_kernels(library, KERNELS)
