"""Kernels that fold numbers together, launched: reductions of any axes, rules for whole rows, running sums."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from anytorch.gpu.runtime import Runtime
from anytorch.gpu.wgsl import reduce as wgsl_reduce
from anytorch.gpu.wgsl import rows as wgsl_rows
from anytorch.gpu.wgsl import scan as wgsl_scan
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, collapse
from anytorch.gpu.wgsl.softmax import RowRule
from anytorch.lite.gpu.kernels import F32, I32, copied, grid
from anytorch.lite.gpu.memory import Layout, dense_strides, new

PART, MOST_PARTS, FEW_ROWS = 4096, 256, 64  # few long rows are cut into parts, whose states a second launch folds
LONG = 32  # from here on a workgroup takes a row; below, and on software adapters, a thread does


def by_group(runtime: Runtime, length: int) -> bool:
    return length > LONG and not runtime.adapter.software


def folded(name: str, x: Layout, over: Sequence[int], places: bool = False) -> tuple[Layout, ...]:
    """Fold the axes `over` of `x`, any strides: one dense row of results, and for extremes the places (int32) if asked."""
    kept = [d for d in range(len(x.shape)) if d not in over]
    outer, (outer_steps,) = collapse([x.shape[d] for d in kept], [[x.strides[d] for d in kept]])
    inner, (inner_steps,) = collapse([x.shape[d] for d in over], [[x.strides[d] for d in over]])
    rows, length = size_of(outer), size_of(inner)
    results = tuple(new((rows,)) for _ in range(1 + places))
    if not rows:
        return results
    runtime = x.memory.runtime
    group = by_group(runtime, length)
    parts = min(-(-length // PART), MOST_PARTS) if group and rows < FEW_ROWS else 1
    chunk = -(-length // parts)
    reducer, outputs = wgsl_reduce.REDUCERS[name], (F32, I32) if places else (F32,)
    stage = "whole" if parts == 1 else "first"
    kernel = wgsl_reduce.Reduce(reducer, (F32,), outputs, "f32", len(outer), len(inner), stage, group=group)
    if kernel.words > MOST_WORDS:  # more axes than parameters: bring the folded ones together
        order = (*kept, *over)
        shape, strides = (tuple(each[d] for d in order) for each in (x.shape, x.strides))
        moved = copied(Layout(x.memory, shape, strides, x.offset))
        return folded(name, moved, range(len(kept), len(order)), places)
    geometry = [*outer, *inner, x.offset, *outer_steps, *inner_steps]
    if parts == 1:
        fold(kernel, x, results, (rows, length, 1, length, length, *geometry))
        return results
    states = new((rows, parts, len(reducer.fields)))
    fold(kernel, x, (states,), (rows, length, parts, chunk, length, *geometry))
    second = wgsl_reduce.Reduce(reducer, (F32,), outputs, "f32", 0, 0, "second", group=True)
    fold(second, states, results, (rows, parts, 1, parts, length))
    return results


def fold(kernel: wgsl_reduce.Reduce, x: Layout, results: Sequence[Layout], numbers: Sequence[int]) -> None:
    """Launch one stage; `numbers` are its parameters but for the places where results begin, which are 0."""
    runtime = x.memory.runtime
    program = runtime.programs.make(
        ("lite", kernel),
        lambda: wgsl_reduce.render(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )
    packed = struct.pack(f"<{len(numbers)}I", *(n % 2**32 for n in numbers)).ljust(4 * kernel.words, b"\0")
    workers = numbers[0] * numbers[2]
    launch = grid(workers if kernel.group else -(-workers // kernel.threads))
    buffers = (x.memory.buffer, *(result.memory.buffer for result in results))
    runtime.dispatch(program, buffers, packed, *launch)


def size_of(sizes: Sequence[int]) -> int:
    n = 1
    for length in sizes:
        n *= length
    return n


def by_rows(
    rule: RowRule,
    inputs: Sequence[tuple[Layout, str]],
    shape: tuple[int, ...],
    dim: int,
    row_outputs: tuple[str, ...] = (),
    scalars: tuple[float, ...] = (),
) -> tuple[Layout, ...]:
    """A rule for rows along `dim` of dense tensors of `shape`: the new tensor, and a number per row for each row output.

    Inputs come with what they are indexed by: "element", "column" or "row".
    """
    length, inner = shape[dim], size_of(shape[dim + 1 :])
    out = new(shape)
    rows = out.size // length if length else 0
    per_row = tuple(new((rows,)) for _ in row_outputs)
    if not out.size:
        return out, *per_row
    runtime = out.memory.runtime
    group = by_group(runtime, length)
    kernel = wgsl_rows.Rows(
        rule.reducer,
        tuple(wgsl_rows.Input(F32, per) for _, per in inputs),
        rule.enter,
        rule.prepare,
        rule.output,
        F32,
        row_outputs,
        scalars=len(scalars),
        strided=inner != 1,
        group=group,
        threads=256 if group and length > 256 else 64,
    )
    program = runtime.programs.make(
        ("lite", kernel),
        lambda: wgsl_rows.render(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )
    packed = struct.pack(
        f"<{3 + len(inputs)}I{len(scalars)}f", rows, length, inner, *(layout.offset for layout, _ in inputs), *scalars
    )
    layouts = (*(layout for layout, _ in inputs), out, *per_row)
    launch = grid(rows if group else -(-rows // kernel.threads))
    runtime.dispatch(program, tuple(layout.memory.buffer for layout in layouts), packed, *launch)
    return out, *per_row


def running(name: str, x: Layout, dim: int) -> Layout:
    """The fold of each row along `dim` up to every place; `x` is dense."""
    out = new(x.shape)
    if not x.size:
        return out
    runtime = x.memory.runtime
    length, inner = x.shape[dim], size_of(x.shape[dim + 1 :])
    rows = x.size // length
    group = by_group(runtime, length)
    kernel = wgsl_scan.Scan(wgsl_scan.SCANS[name], F32, (F32,), "f32", group)
    program = runtime.programs.make(
        ("lite", kernel),
        lambda: wgsl_scan.render(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * wgsl_scan.WORDS,
    )
    packed = struct.pack(f"<{wgsl_scan.WORDS}I", rows, length, inner, 1, length, x.offset)
    launch = grid(rows if group else -(-rows // wgsl_scan.THREADS))
    runtime.dispatch(program, (x.memory.buffer, out.memory.buffer), packed, *launch)
    return out


def as_shape(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """The same dense numbers under another shape."""
    return Layout(layout.memory, shape, dense_strides(shape), layout.offset)
