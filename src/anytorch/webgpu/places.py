"""Reading and writing elements at places other tensors name: from tensors to launches of the kernels in wgsl.indexing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from anytorch.gpu.buffers import SHIFT
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
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
KEPT = 10_000  # geometries

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
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """A contiguous tensor of `size`: each element from `source` (walked with `strides`, from `offset` elements on) at the
    place the indices name. A new tensor, or `into` where that can be written as a whole. None: this adapter cannot bind a
    buffer that large."""
    if into is not None and _whole(into) and into.data_ptr() >> SHIFT != source.data_ptr() >> SHIFT:
        result = into
    else:
        result = new_contiguous(size, source.dtype)
    if result.numel() == 0:
        return result
    starts = (int(source.storage_offset()) + offset,)
    launch = prepared("", source.dtype, size, (strides,), indices, starts, wrap)
    return result if launch([source, *[index[0] for index in indices], result], starts, indices) else None


def _whole(tensor: torch.Tensor) -> bool:
    """Does the tensor fill its storage, without gaps?"""
    filled = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    return filled and tensor.is_contiguous()


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
    starts = (int(source.storage_offset()), int(target.storage_offset()))
    launch = prepared(mode, target.dtype, size, (source_strides, strides), indices, starts, wrap)
    return launch([source, *[index[0] for index in indices], target], starts, indices)


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


class Launch:
    """All that does not change between two launches with the same geometry."""

    __slots__ = ("factor", "pack", "program", "runtime", "tail", "x", "y")

    def __init__(
        self, runtime: Runtime, kernel: Gather | Scatter, factor: int, tail: Sequence[int], count: int
    ) -> None:
        gathers = isinstance(kernel, Gather)
        self.runtime = runtime
        self.program = runtime.programs.make(
            kernel,
            lambda: render_gather(kernel) if isinstance(kernel, Gather) else render_scatter(kernel),
            buffers=kernel.buffers,
            writable=kernel.writable,
            immediates=4 * kernel.walk.words,
        )
        self.factor = factor  # elements that travel as one
        self.x, self.y = _groups(-(-count // kernel.per_thread) if gathers else count)
        self.pack = struct.Struct(f"{kernel.walk.walked}I").pack
        head = struct.pack("2I", count, self.x * WORKGROUP)
        self.tail = (head, struct.pack(f"{len(tail)}I", *[word % 2**32 for word in tail]))

    def __call__(self, tensors: Sequence[torch.Tensor], starts: Sequence[int], indices: Sequence[Index]) -> bool:
        """False: this adapter cannot bind a buffer that large. Whole buffers are bound; `starts` are parameters."""
        runtime, factor = self.runtime, self.factor
        table = runtime.buffers
        buffers = [table[tensor.data_ptr() >> SHIFT] for tensor in tensors]
        limit = runtime.binding_limit
        for buffer in buffers:
            if buffer.nbytes > limit:
                return False
        words = [start // factor for start in starts]
        words += [int(index[0].storage_offset()) for index in indices]
        head, tail = self.tail
        runtime.dispatch(self.program, buffers, head + self.pack(*words) + tail, self.x, self.y)
        return True


_launches: dict[tuple[object, ...], Launch] = device_memory()


def prepared(
    mode: str,
    dtype: torch.dtype,
    size: Sequence[int],
    strides: Sequence[Sequence[int]],
    indices: Sequence[Index],
    starts: Sequence[int],
    wrap: bool,
) -> Launch:
    """The launch for this geometry; `mode` is "" for reading."""
    runtime = open_runtime()
    aligned = 0
    for start in starts:
        aligned |= start
    key = (
        mode,
        dtype,
        wrap,
        aligned & 15,
        *size,
        *[tuple(steps) for steps in strides],
        *[(index.dtype, tuple(steps), length, stride) for index, steps, length, stride in indices],
    )
    launch = _launches.get(key)
    if launch is None or launch.runtime is not runtime:
        if len(_launches) >= KEPT:
            _launches.clear()
        launch = _launches[key] = _make(runtime, mode, dtype, size, strides, indices, aligned, wrap)
    return launch


def _make(
    runtime: Runtime,
    mode: str,
    dtype: torch.dtype,
    size: Sequence[int],
    strides: Sequence[Sequence[int]],
    indices: Sequence[Index],
    aligned: int,
    wrap: bool,
) -> Launch:
    count = 1
    for length in size:
        count *= length
    operands, nbytes = len(strides), dtype.itemsize
    sizes, merged = collapse(size, [*strides, *[index[1] for index in indices]])
    steps = [index[3] for index in indices]
    wide = nbytes
    dense = bool(sizes) and all(m[-1] == 1 for m in merged[:operands]) and all(m[-1] == 0 for m in merged[operands:])
    if mode in ("", "set") and dense:
        others = [aligned, *steps, *[step for m in merged[:operands] for step in m[:-1]]]
        wide = widest(nbytes, sizes[-1], others)
    factor = wide // nbytes
    if factor > 1:
        sizes[-1] //= factor
        count //= factor
        steps = [step // factor for step in steps]
        for m in merged[:operands]:
            m[:-1] = [step // factor for step in m[:-1]]
    extents = [(index[2], step) for index, step in zip(indices, steps, strict=True)]
    walk = Walk(operands, tuple(str(index[0].dtype)[6:] for index in indices), len(sizes), wrap)
    tail = [*sizes, *[step for m in merged for step in m], *[number for pair in extents for number in pair]]
    if walk.words > MOST_WORDS:
        walk = replace(walk, shape=tuple(sizes), strides=tuple(tuple(m) for m in merged), extents=tuple(extents))
        tail = []
    if not mode:
        return Launch(runtime, Gather(wide, walk), factor, tail, count)
    kind = "" if mode == "set" else str(dtype)[6:]
    atomics = mode == "sum" and kind == "float32" and "shader-float32-atomic" in runtime.features
    return Launch(runtime, Scatter(wide, walk, mode, kind, atomics), factor, tail, count)
