"""Folds some dimensions of tensors away, in one launch or two: what sums, extremes, variances and gradients are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import Runtime, open_runtime
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, collapse
from anytorch.gpu.wgsl.reduce import QUADS, REDUCERS, SLOTS, THREADS, Reduce, Reducer, levels_of, render, shufflable
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import narrowed
from anytorch.webgpu.dtypes import name_of, word_dtype
from anytorch.webgpu.launch import Result, result_of
from anytorch.webgpu.tensors import new_contiguous, sized_tensor

SHORT = 1024  # up to this length a subgroup takes a row

# What a fold of nothing is, per reducer: its results' values.
_OF_NOTHING: dict[str, tuple[float, ...]] = {
    "mean": (math.nan,),
    "prod": (1,),
    "all": (1,),
    "var": (math.nan, math.nan),
    "std": (math.nan, math.nan),
    "logsumexp": (-math.inf,),
}


class Fold:
    """The plans that fold tensors of one geometry: rows cut into parts have their states folded by a second launch."""

    __slots__ = ("first", "outputs", "partial", "results", "second")

    def __init__(self, outputs: Sequence[torch.dtype], size: Sequence[int]) -> None:
        self.outputs = tuple(outputs)
        self.results = [result_of(size, word_dtype(dtype)) for dtype in outputs]
        self.first: Plan
        self.second: Plan | None = None
        self.partial: Result | None = None  # the states

    def __call__(self, *addresses: int) -> list[torch.Tensor]:
        made = [sized_tensor(*result) for result in self.results]
        if self.second is None:
            self.first((*addresses, *[tensor.data_ptr() for tensor in made]))
        else:
            assert self.partial is not None
            partial = sized_tensor(*self.partial)
            self.first((*addresses, partial.data_ptr()))
            self.second((partial.data_ptr(), *[tensor.data_ptr() for tensor in made]))
        return [narrowed(tensor, dtype) for tensor, dtype in zip(made, self.outputs, strict=True)]


def reduce_dims(
    name: str,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    outputs: Sequence[torch.dtype],
    size: Sequence[int],
    scalars: tuple[float, ...] = (),
    compute: str | None = None,
    reducer: Reducer | None = None,
) -> list[torch.Tensor]:
    """Fold `dims` of the inputs (all of one shape, any strides) away; the results are contiguous and of shape `size`.

    `compute` is the WGSL type elements are converted to; the first input's own where it is not given. The dtypes must be
    usable(). `reducer` is given where `name` is not one of REDUCERS.
    """
    first = inputs[0]
    if first.numel() == 0:
        values = _OF_NOTHING.get(name, (0,) * len(outputs))
        return [new_contiguous(size, dtype).fill_(value) for dtype, value in zip(outputs, values, strict=False)]
    fold = find_fold(name, inputs, dims, outputs, size, scalars, compute, reducer)
    if fold is None:  # more dimensions than the parameters hold: bring the folded ones together
        kept = [d for d in range(first.dim()) if d not in dims]
        inputs = [t.permute([*kept, *dims]).contiguous() for t in inputs]
        return reduce_dims(name, inputs, range(len(kept), first.dim()), outputs, size, scalars, compute, reducer)
    return fold(*[tensor.data_ptr() for tensor in inputs])


class _Rows:
    """The geometry of a fold: rows, each of the elements that become one."""

    def __init__(self, inputs: Sequence[torch.Tensor], dims: Sequence[int]) -> None:
        shape, strides = inputs[0].shape, [t.stride() for t in inputs]
        kept = [d for d in range(len(shape)) if d not in dims]
        sizes, self.kept_steps = collapse([shape[d] for d in kept], [[s[d] for d in kept] for s in strides])
        lengths, self.row_steps = collapse([shape[d] for d in dims], [[s[d] for d in dims] for s in strides])
        self.kept, self.reduced = len(sizes), len(lengths)
        self.rows, self.length = math.prod(sizes), math.prod(lengths)
        self.sizes = (*sizes, *lengths)
        self.places = [t.dtype.itemsize for t in inputs]
        self.steps = [
            step for pair in zip(self.kept_steps, self.row_steps, strict=True) for each in pair for step in each
        ]

    def plan(self, kernel: Reduce, parts: int, chunk: int, groups: int, scalars: Sequence[float] = ()) -> Plan:
        return Plan(
            kernel,
            render,
            grid(groups),
            self.places,
            kernel.writable,
            unplaced=kernel.buffers - len(self.places),
            head=(self.rows, self.length, parts, chunk, self.length, *self.sizes),
            tail=(*self.steps, *map(float, scalars)),
        )


def find_fold(
    name: str,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    outputs: Sequence[torch.dtype],
    size: Sequence[int],
    scalars: tuple[float, ...],
    compute: str | None,
    reducer: Reducer | None = None,
) -> Fold | None:
    """The fold of this geometry; None where it has more dimensions than the parameters hold."""
    layouts = [(t.dtype, t.size(), t.stride()) for t in inputs]
    aligned = inputs[0].data_ptr() & 15 == 0
    key = ("fold", name, tuple(dims), tuple(outputs), tuple(size), scalars, compute, aligned, *layouts)
    known: Fold | None = plans[key]
    if known is not None:
        return known
    runtime = open_runtime()
    reducer = reducer or REDUCERS[name]
    fold, geometry = Fold(outputs, size), _Rows(inputs, dims)
    rows, length = geometry.rows, geometry.length
    kernel = Reduce(
        reducer,
        tuple(name_of(t.dtype) for t in inputs),
        tuple(name_of(word_dtype(dtype)) for dtype in outputs),
        compute or KINDS[name_of(inputs[0].dtype)].compute,
        geometry.kept,
        geometry.reduced,
        scalars=len(scalars),
    )
    if kernel.words > MOST_WORDS:
        return None
    # Neighbouring threads should read neighbouring elements: along the row, or across rows, whichever steps less.
    kept_steps, row_steps = geometry.kept_steps[0], geometry.row_steps[0]
    across = bool(kept_steps) and (not row_steps or kept_steps[-1] < row_steps[-1])
    group, threads, parts = share_work(rows, length, across, runtime.adapter.software)
    chunk = -(-length // parts)
    dense = list(row_steps) == [1] and length % 4 == 0 and all(step % 4 == 0 for step in kept_steps)
    quads = group and len(inputs) == 1 and dense and aligned and name_of(inputs[0].dtype) in QUADS
    if quads:
        chunk = -(-chunk // 4) * 4
        parts = -(-length // chunk)
    subgroups = group and has_subgroups(runtime)
    slots = subgroups and parts == 1 and length <= SHORT and shufflable(reducer, kernel.compute)
    levels = levels_of(1 if slots else chunk // (threads if group else 1)) if kernel.compute == "f32" else 1
    kernel = replace(kernel, group=group, threads=threads, subgroups=subgroups, quads=quads, slots=slots, levels=levels)
    workers = rows * parts
    groups = -(-rows // SLOTS) if slots else workers if group else -(-workers // threads)
    if parts == 1:
        fold.first = geometry.plan(kernel, parts, chunk, groups, scalars)
        plans[key] = fold
        return fold
    fold.first = geometry.plan(replace(kernel, stage="first"), parts, chunk, groups, scalars)
    fold.partial = result_of((workers * state_words(reducer, kernel.compute),), torch.int32)
    small = runtime.adapter.software or parts <= 32 or rows >= 256
    subgroups = not small and has_subgroups(runtime)
    last = replace(kernel, stage="second", group=not small, threads=64, quads=False, subgroups=subgroups)
    last = replace(last, levels=levels_of(parts // (64 if last.group else 1)))
    fold.second = Plan(
        last,
        render,
        grid(rows if last.group else -(-rows // 64)),
        (),
        last.writable,
        unplaced=last.buffers,
        head=(rows, parts, 1, parts, length),
        tail=tuple(map(float, scalars)),
    )
    plans[key] = fold
    return fold


def part_states(
    reducer: Reducer, x: torch.Tensor, dims: Sequence[int], parts: int, chunk: int, compute: str
) -> torch.Tensor:
    """The states of each row's parts, `chunk` elements each, as raw words in the order (part, row)."""
    key: Any = ("part states", reducer, x.dtype, x.size(), x.stride(), tuple(dims), parts, chunk, compute)
    plan = plans[key]
    if plan is None:
        geometry = _Rows((x,), dims)
        kernel = Reduce(
            reducer,
            (name_of(x.dtype),),
            (),
            compute,
            geometry.kept,
            geometry.reduced,
            stage="first",
            threads=256,
            group=True,
            subgroups=has_subgroups(open_runtime()),
            levels=levels_of(chunk // 256),
        )
        plan = plans[key] = geometry.plan(kernel, parts, chunk, geometry.rows * parts)
        plan.result = result_of((geometry.rows * parts * state_words(reducer, compute),), torch.int32)
    states = sized_tensor(*plan.result)
    plan((x.data_ptr(), states.data_ptr()))
    return states


def share_work(rows: int, length: int, across: bool, software: bool) -> tuple[bool, int, int]:
    """Whether a workgroup takes a row, its threads, and the parts a row is cut into."""
    if software:
        return False, THREADS, 1 if rows >= 32 or length <= 1024 else min(-(-length // 512), 256)
    if across or length <= 16:
        wanted = 1 << 16  # threads that keep a large GPU busy
        return False, THREADS, max(1, min(wanted // rows, -(-length // 32)))
    if length <= 512:
        return True, 64, 1
    return True, 256, 1 if rows >= 512 or length <= 8192 else max(1, min(1024 // rows, -(-length // 4096)))


def has_subgroups(runtime: Runtime) -> bool:
    return "subgroup" in runtime.features and not runtime.adapter.software


def state_words(reducer: Reducer, compute: str) -> int:
    """32-bit words of a state in a buffer, with WGSL's alignment."""
    at, widest = 0, 1
    for _, kind, _ in reducer.fields:
        words = 2 if kind.replace("{T}", compute) == "i64" else 1
        widest = max(widest, words)
        at = -(-at // words) * words + words
    return -(-at // widest) * widest
