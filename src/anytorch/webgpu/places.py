"""Reading and writing elements at places other tensors name: from tensors to launches of the kernels in wgsl.indexing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from anytorch.gpu.buffers import SHIFT
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, open_runtime
from anytorch.gpu.wgsl.elementwise import collapse
from anytorch.gpu.wgsl.indexing import (
    MOST_WORDS,
    WORKGROUP,
    Compact,
    Gather,
    Scatter,
    Walk,
    render_compact,
    render_gather,
    render_scatter,
    widest,
)
from anytorch.webgpu.copies import contiguous
from anytorch.webgpu.tensors import buffer_of, new_contiguous

MOST_GROUPS = 65_535

# An index tensor broadcast to the walk, and the size and stride of the dimension it indexes.
Index = tuple[torch.Tensor, Sequence[int], int, int]


def gather(
    source: torch.Tensor,
    size: Sequence[int],
    strides: Sequence[int],
    indices: Sequence[Index] = (),
    *,
    offset: int = 0,
    wrap: bool = False,
) -> torch.Tensor | None:
    """A new contiguous tensor of `size`: each element from `source` (walked with `strides`, from `offset` elements on)
    at the place the indices name. None: this adapter cannot bind a buffer that large."""
    result = new_contiguous(size, source.dtype)
    if result.numel() == 0:
        return result
    nbytes = source.dtype.itemsize
    base = int(source.storage_offset()) + offset
    plan = _plan(size, [strides], indices, [base], nbytes, wrap)
    walk, wide, parameters, count = plan
    kernel = Gather(wide, walk)
    runtime = open_runtime()
    program = runtime.programs.make(
        kernel,
        lambda: render_gather(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * walk.words,
    )
    tensors = [source, *[index[0] for index in indices], result]
    return result if _launch(runtime, program, tensors, parameters, count, kernel.per_thread) else None


def scatter(
    target: torch.Tensor,
    strides: Sequence[int],
    source: torch.Tensor,
    source_strides: Sequence[int],
    size: Sequence[int],
    indices: Sequence[Index],
    *,
    mode: str = "set",
    wrap: bool = False,
) -> bool:
    """Write `source` (walked over `size`) into `target` where the indices say. False: this adapter cannot.

    `mode` other than "set" combines with what is there: float32 and int32, and int64 sums.
    """
    if 0 in size:
        return True
    held = target.data_ptr() >> SHIFT
    if source.data_ptr() >> SHIFT == held:  # would be bound for reading and writing at once
        source = source.as_strided(size, source_strides, source.storage_offset()).clone(
            memory_format=torch.contiguous_format
        )
        source_strides = source.stride()
    indices = [
        (_elsewhere(index, size, steps) if index.data_ptr() >> SHIFT == held else (index, steps)) + (length, stride)
        for index, steps, length, stride in indices
    ]
    dtype = str(target.dtype)[6:]
    offsets = [int(source.storage_offset()), int(target.storage_offset())]
    nbytes = target.dtype.itemsize
    walk, wide, parameters, count = _plan(
        size, [source_strides, strides], indices, offsets, nbytes, wrap, widen=mode == "set"
    )
    runtime = open_runtime()
    kernel = Scatter(
        wide,
        walk,
        mode,
        "" if mode == "set" else dtype,
        mode == "sum" and dtype == "float32" and "shader-float32-atomic" in runtime.features,
    )
    program = runtime.programs.make(
        kernel,
        lambda: render_scatter(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * walk.words,
    )
    tensors = [source, *[index[0] for index in indices], target]
    return _launch(runtime, program, tensors, parameters, count, 1)


def _elsewhere(index: torch.Tensor, size: Sequence[int], steps: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
    copy = index.as_strided(size, steps, index.storage_offset()).clone(memory_format=torch.contiguous_format)
    return copy, copy.stride()


def positions(mask: torch.Tensor) -> torch.Tensor | None:
    """The coordinates of every element of a bool tensor that is set, a row each, as torch.nonzero returns them.

    Waits for the device: how many there are decides the result's size.
    """
    count = mask.numel()
    rank = mask.dim()
    if count == 0:
        return new_contiguous((0, rank), torch.int64)
    flat = contiguous(mask).reshape(-1)
    counts = flat.to(torch.int32).cumsum(0, dtype=torch.int32)
    total = int(counts[-1].item())
    result = new_contiguous((total, rank), torch.int64)
    if total == 0 or rank == 0:
        return result
    kernel = Compact(rank)
    runtime = open_runtime()
    program = runtime.programs.make(
        kernel, lambda: render_compact(kernel), buffers=3, writable=4, immediates=4 * kernel.words
    )
    x, y = _groups(count)
    head = (count, x * WORKGROUP, flat.storage_offset(), counts.storage_offset())
    parameters = struct.pack(f"{4 + rank}I", *head, *mask.shape)
    buffers = [buffer_of(t)[0] for t in (flat, counts, result)]
    if any(buffer.nbytes > runtime.binding_limit for buffer in buffers):
        return None
    runtime.dispatch(program, buffers, parameters, x, y)
    return result


def _groups(threads: int) -> tuple[int, int]:
    groups = -(-threads // WORKGROUP)
    x = min(groups, MOST_GROUPS)
    return x, -(-groups // x)


def _plan(
    size: Sequence[int],
    strides: Sequence[Sequence[int]],
    indices: Sequence[Index],
    offsets: Sequence[int],
    nbytes: int,
    wrap: bool,
    *,
    widen: bool = True,
) -> tuple[Walk, int, bytes, int]:
    """The walk, the bytes of one element, the parameters after n and row, and how many elements there are."""
    count = 1
    for length in size:
        count *= length
    sizes, merged = collapse(size, [*strides, *[index[1] for index in indices]])
    operands = len(strides)
    wide = nbytes
    steps = [index[3] for index in indices]
    starts = list(offsets)
    if widen and sizes and all(m[-1] == 1 for m in merged[:operands]) and all(m[-1] == 0 for m in merged[operands:]):
        others = [*starts, *steps, *[step for m in merged[:operands] for step in m[:-1]]]
        wide = widest(nbytes, sizes[-1], others)
        factor = wide // nbytes
        if factor > 1:
            sizes[-1] //= factor
            count //= factor
            starts = [start // factor for start in starts]
            steps = [step // factor for step in steps]
            for m in merged[:operands]:
                m[:-1] = [step // factor for step in m[:-1]]
    kinds = tuple(str(index[0].dtype)[6:] for index in indices)
    walk = Walk(operands, kinds, len(sizes), wrap)
    starts += [int(index[0].storage_offset()) for index in indices]
    extents = [(index[2], step) for index, step in zip(indices, steps, strict=True)]
    words: list[int] = [*starts]
    if walk.words > MOST_WORDS:
        walk = replace(walk, shape=tuple(sizes), strides=tuple(tuple(m) for m in merged), extents=tuple(extents))
    else:
        words += [*sizes, *[step for m in merged for step in m], *[number for pair in extents for number in pair]]
    return walk, wide, struct.pack(f"{len(words)}I", *[word % 2**32 for word in words]), count


def _launch(
    runtime: Runtime,
    program: Program,
    tensors: Sequence[torch.Tensor],
    parameters: bytes,
    count: int,
    per_thread: int,
) -> bool:
    """The parameters carry each tensor's offset, so whole buffers are bound."""
    buffers = [buffer_of(tensor)[0] for tensor in tensors]
    if any(buffer.nbytes > runtime.binding_limit for buffer in buffers):
        return False
    x, y = _groups(-(-count // per_thread))
    runtime.dispatch(program, buffers, struct.pack("2I", count, x * WORKGROUP) + parameters, x, y)
    return True
