"""Launches kernels over several tensors at once (`gpu.wgsl.multi`): an optimizer's step is one launch per parameter."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.multi import WORKGROUP, Multi, render
from anytorch.gpu.wgsl.types import supported
from anytorch.webgpu.pointwise import MOST_GROUPS, name_of
from anytorch.webgpu.tensors import NAME, aten

WINDOW_STEP = 256  # bindings start on multiples of this on every adapter


def fits(tensors: Sequence[torch.Tensor], cells: Sequence[torch.Tensor] = ()) -> bool:
    """Can one launch walk these tensors together? Dense, of one size and layout, of dtypes the adapter computes with."""
    first = tensors[0]
    features = open_runtime().features
    return (
        all(t.device.type == NAME for t in (*tensors, *cells))
        and all(t.shape == first.shape and t.stride() == first.stride() for t in tensors)
        and aten.is_non_overlapping_and_dense(first)
        and all(supported(name_of(t.dtype), features) and t.dtype is not torch.float64 for t in tensors)
        and all(c.dtype is torch.float32 and c.numel() == 1 for c in cells)
        # A word of a two-byte type is written whole: its two elements must be ours.
        and all(t.data_ptr() % 4 == 0 for t in tensors)
        and len(tensors) + len(cells) <= int(open_runtime().limits["max-storage-buffers-per-shader-stage"])
    )


@lru_cache(maxsize=1024)
def _kernel(
    body: str,
    tensors: tuple[torch.dtype, ...],
    written: tuple[bool, ...],
    cells_written: tuple[bool, ...],
    numbers: tuple[str, ...],
    shared: bool,
) -> Multi:
    names = tuple(name_of(dtype) for dtype in tensors)
    return Multi(body, names, written, len(cells_written), cells_written, numbers, shared)


def launch(
    body: str,
    tensors: Sequence[torch.Tensor],
    written: tuple[bool, ...],
    cells: Sequence[torch.Tensor] = (),
    cells_written: tuple[bool, ...] = (),
    numbers: dict[str, float] | None = None,
) -> None:
    """Run `body` at every element. The caller has asked `fits`."""
    n = tensors[0].numel()
    if n == 0:
        return
    numbers = numbers or {}
    runtime = open_runtime()
    addresses = [t.data_ptr() for t in (*tensors, *cells)]
    buffers = [runtime.buffers[address >> SHIFT] for address in addresses]
    offsets = [address & OFFSET_MASK for address in addresses]
    sizes = [t.dtype.itemsize for t in (*tensors, *cells)]
    shared = len({buffer.key for buffer in buffers}) < len(buffers)
    flags = cells_written or (False,) * len(cells)
    kernel = _kernel(body, tuple(t.dtype for t in tensors), written, flags, tuple(numbers), shared)
    program = runtime.programs.make(
        kernel,
        lambda: render(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )
    values = list(numbers.values())
    pack = struct.Struct(f"<{2 + len(buffers)}I{len(values)}f").pack
    limit = runtime.binding_limit
    whole = all(buffer.nbytes <= limit for buffer in buffers)
    most = n if whole else (limit // max(sizes) - WINDOW_STEP) // WINDOW_STEP * WINDOW_STEP
    for start in range(0, n, most):  # once, but for tensors beyond the binding limit
        length = min(most, n - start)
        # A cell's place does not move with the elements.
        begins = [
            o + (start * s if i < len(tensors) else 0) for i, (o, s) in enumerate(zip(offsets, sizes, strict=True))
        ]
        windows = None
        if not whole:
            made = []
            for i, begin in enumerate(begins):
                base = begin // WINDOW_STEP * WINDOW_STEP
                span = begin - base + (length if i < len(tensors) else 1) * sizes[i]
                made.append((base, min(-(-span // 16) * 16, buffers[i].nbytes - base)))
                begins[i] = begin - base
            windows = tuple(made)
        groups = math.ceil(length / (kernel.per_thread * WORKGROUP))
        x = min(groups, MOST_GROUPS)
        places = [begin // size for begin, size in zip(begins, sizes, strict=True)]
        runtime.dispatch(
            program, buffers, pack(length, x * WORKGROUP, *places, *values), x, -(-groups // x), windows=windows
        )
