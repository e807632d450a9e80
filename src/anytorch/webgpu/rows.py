"""Launches rules for whole rows (`gpu.wgsl.rows`): softmax and the norms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.reduce import QUADS, SLOTS, levels_of
from anytorch.gpu.wgsl.rows import Input, Rows, render
from anytorch.gpu.wgsl.softmax import RowRule
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import narrowed
from anytorch.webgpu.dtypes import FLOATS, name_of, word_dtype
from anytorch.webgpu.folds import SHORT, has_subgroups
from anytorch.webgpu.launch import made_by, result_of
from anytorch.webgpu.tensors import new_contiguous

MOST_HELD = 4  # quads per thread that stay in registers
Geometry = tuple[int, int, int]  # rows, their length, the distance between a row's elements
Inputs = Sequence[tuple[torch.Tensor, str]]  # dense tensors, with what each is indexed by


def row_geometry(x: torch.Tensor, dim: int) -> Geometry:
    """The rows along `dim` of a dense tensor."""
    if x.dim() == 0:
        return 1, 1, 1
    dim %= x.dim()
    length = x.size(dim)
    return (x.numel() // length if length else 0), length, max(math.prod(x.shape[dim + 1 :]), 1)


def run_rows(
    rule: RowRule,
    inputs: Inputs,
    geometry: Geometry,
    size: Sequence[int],
    dtype: torch.dtype,
    row_outputs: Sequence[tuple[str, torch.Tensor]] = (),
    extras: tuple[int, ...] = (),
    scalars: tuple[float, ...] = (),
) -> torch.Tensor:
    """Run a row rule over dense inputs; a new tensor of `size` and `dtype`.

    `row_outputs` are expressions and the f32 tensors, one element per row, they are written to; a rule must always be
    given the same ones.
    """
    addresses = [tensor.data_ptr() for tensor, _ in inputs]
    if not all(addresses):  # an empty tensor: nothing to compute
        return new_contiguous(size, dtype)
    aligned = not any(address & 15 for address, (_, per) in zip(addresses, inputs, strict=True) if per != "row")
    kinds = [(tensor.dtype, per) for tensor, per in inputs]
    key = (rule, *geometry, size, dtype, extras, scalars, aligned, *kinds)
    plan = plans[key]
    if plan is None:
        expressions = tuple(expression for expression, _ in row_outputs)
        plan = plans[key] = row_plan(rule, inputs, geometry, size, dtype, aligned, expressions, extras, scalars)
    return narrowed(made_by(plan, addresses, *[tensor.data_ptr() for _, tensor in row_outputs]), dtype)


def row_plan(
    rule: RowRule,
    inputs: Inputs,
    geometry: Geometry,
    size: Sequence[int],
    dtype: torch.dtype,
    aligned: bool,
    row_outputs: tuple[str, ...] = (),
    extras: tuple[int, ...] = (),
    scalars: tuple[float, ...] = (),
) -> Plan:
    """The plan `run_rows` takes. A dtype whose words are not whole per row is written as a wider one."""
    runtime = open_runtime()
    rows, length, inner = geometry
    whole_words = inner == 1 and length % KINDS[name_of(dtype)].lanes == 0
    written = dtype if whole_words else word_dtype(dtype)
    group = not runtime.adapter.software and length > 32 and (inner == 1 or rows < 4096)
    kinds = tuple(Input(name_of(tensor.dtype), per) for tensor, per in inputs)
    quads = aligned and inner == 1 and length % 4 == 0 and all(i.dtype in QUADS for i in kinds) and dtype in FLOATS
    elements = length // 4 if quads else length
    slots = group and has_subgroups(runtime) and length <= SHORT
    threads = 64 if not group or elements <= 256 else 256
    held = 0
    if quads and group:  # a subgroup is of 32 as a rule
        held = min(-(-elements // 32), 2 * MOST_HELD) if slots else min(-(-elements // threads), MOST_HELD)
    kernel = Rows(
        rule.reducer,
        kinds,
        rule.enter,
        rule.prepare,
        rule.output,
        name_of(written),
        row_outputs,
        len(extras),
        len(scalars),
        strided=inner != 1,
        threads=threads,
        group=group,
        subgroups=group and has_subgroups(runtime),
        slots=slots,
        quads=quads,
        held=held,
        twice=rule.twice,
        levels=levels_of(length // (32 if slots else threads if group else 1)),
    )
    return Plan(
        kernel,
        render,
        grid(-(-rows // SLOTS) if slots else rows if group else -(-rows // kernel.threads)),
        [tensor.dtype.itemsize for tensor, _ in inputs],
        kernel.writable,
        unplaced=1 + len(row_outputs),
        head=geometry,
        tail=(*extras, *map(float, scalars)),
        result=result_of(size, written),
    )
