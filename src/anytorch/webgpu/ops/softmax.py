"""Softmax and log-softmax in one launch each, forward and backward."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
from anytorch.gpu.wgsl.reduce import QUADS, SLOTS
from anytorch.gpu.wgsl.rows import Input, Rows, render
from anytorch.gpu.wgsl.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD, RowRule
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import contiguous
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.ops.reductions import (
    SHORT,
    bindable,
    grid,
    has_subgroups,
    infer,
    narrowed,
    on_webgpu,
    register_with_out,
    usable,
    word_dtype,
)
from anytorch.webgpu.pointwise import name_of
from anytorch.webgpu.tensors import aten, new_contiguous


@dataclass(frozen=True)
class Plan:
    """All of a launch but its tensors."""

    program: Program
    x: int
    y: int
    written: torch.dtype
    head: bytes  # rows, length, inner
    offsets: struct.Struct
    tail: bytes  # extras and scalars


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_plans: dict[Any, Plan] = device_memory()


def run_rows(
    rule: RowRule,
    inputs: Sequence[tuple[torch.Tensor, str]],
    rows: int,
    length: int,
    inner: int,
    size: Sequence[int],
    dtype: torch.dtype,
    row_outputs: Sequence[tuple[str, torch.Tensor]] = (),
    extras: tuple[int, ...] = (),
    scalars: tuple[float, ...] = (),
) -> torch.Tensor:
    """Run a row rule over dense inputs, given with what each is indexed by; a new tensor of `size` and `dtype`.

    `row_outputs` are expressions and the f32 tensors, one element per row, they are written to; a rule must always be
    given the same ones.
    """
    runtime = open_runtime()
    table = runtime.buffers
    key: list[Any] = [rule, rows, length, inner, dtype, extras, scalars]
    bound, offsets, misaligned = [], [], 0
    for tensor, per in inputs:
        address = tensor.data_ptr()
        if not address:  # an empty tensor: nothing to compute
            return new_contiguous(size, dtype)
        key.append((tensor.dtype, per))
        bound.append(table[address >> SHIFT])
        offsets.append((address & OFFSET_MASK) // tensor.itemsize)
        if per != "row":
            misaligned |= address & 15
    key.append(misaligned == 0)
    identity = tuple(key)
    plan = _plans.get(identity)
    if plan is None:
        outputs = tuple(expression for expression, _ in row_outputs)
        kinds = tuple(Input(name_of(t.dtype), per) for t, per in inputs)
        plan = _plans[identity] = _make_plan(
            runtime, rule, kinds, rows, length, inner, dtype, outputs, extras, scalars, not misaligned
        )
    made = new_contiguous(size, plan.written)
    bound.append(table[made.data_ptr() >> SHIFT])
    bound += [table[t.data_ptr() >> SHIFT] for _, t in row_outputs]
    bindable(runtime, bound)
    runtime.dispatch(plan.program, bound, plan.head + plan.offsets.pack(*offsets) + plan.tail, plan.x, plan.y)
    return made if plan.written is dtype else narrowed(made, dtype)


def _make_plan(
    runtime: Runtime,
    rule: RowRule,
    inputs: tuple[Input, ...],
    rows: int,
    length: int,
    inner: int,
    dtype: torch.dtype,
    row_outputs: tuple[str, ...],
    extras: tuple[int, ...],
    scalars: tuple[float, ...],
    aligned: bool,
) -> Plan:
    whole_words = inner == 1 and length % KINDS[name_of(dtype)].lanes == 0
    written = dtype if whole_words else word_dtype(dtype)
    group = not runtime.adapter.software and length > 32 and (inner == 1 or rows < 4096)
    quads = aligned and inner == 1 and length % 4 == 0 and all(i.dtype in QUADS for i in inputs) and dtype in _FLOATS
    elements = length // 4 if quads else length
    slots = group and has_subgroups(runtime) and length <= SHORT
    kernel = Rows(
        rule.reducer,
        inputs,
        rule.enter,
        rule.prepare,
        rule.output,
        name_of(written),
        row_outputs,
        len(extras),
        len(scalars),
        strided=inner != 1,
        threads=64 if not group or elements <= 256 else 256,
        group=group,
        subgroups=group and has_subgroups(runtime),
        slots=slots,
        quads=quads,
    )
    x, y = grid(-(-rows // SLOTS) if slots else rows if group else -(-rows // kernel.threads))
    return Plan(
        _program(runtime, kernel),
        x,
        y,
        written,
        struct.pack("<3I", rows, length, inner),
        struct.Struct(f"<{len(inputs)}I"),
        struct.pack(f"<{len(extras)}I{len(scalars)}f", *extras, *scalars),
    )


def _program(runtime: Runtime, kernel: Rows) -> Program:
    return runtime.programs.make(
        kernel, lambda: render(kernel), buffers=kernel.buffers, writable=kernel.writable, immediates=4 * kernel.words
    )


def row_geometry(x: torch.Tensor, dim: int) -> tuple[int, int, int]:
    """Rows, length and the distance between a row's elements, for a dense tensor."""
    if x.dim() == 0:
        return 1, 1, 1
    dim %= x.dim()
    length = x.size(dim)
    inner = 1
    for size in x.shape[dim + 1 :]:
        inner *= size
    return (x.numel() // length if length else 0), length, max(inner, 1)


def _forward(op: Any, rule: RowRule) -> Callable[..., Any]:
    known: dict[Any, tuple[int, int, int] | None] = {}

    def kernel(self: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        key = (self.dtype, self.size(), dim)
        geometry = known.get(key, ())
        if geometry == ():
            infer(op, self, dim, False)
            ours = self.is_floating_point() and usable(open_runtime(), self.dtype)
            geometry = known[key] = row_geometry(self, dim) if ours else None
        if not geometry:
            return fallback(op, self, dim, half_to_float)
        dtype = torch.float32 if half_to_float else self.dtype
        return run_rows(rule, ((contiguous(self), "element"),), *geometry, self.size(), dtype)

    return kernel


def _backward(op: Any, rule: RowRule) -> Callable[..., Any]:
    def kernel(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if not usable(open_runtime(), grad.dtype, output.dtype, input_dtype):
            return fallback(op, grad, output, dim, input_dtype)
        on_webgpu(op, grad, output)
        inputs = [(contiguous(grad), "element"), (contiguous(output), "element")]
        return run_rows(rule, inputs, *row_geometry(grad, dim), grad.shape, input_dtype)

    return kernel


# --- with a mask ------------------------------------------------------------------------------------------------------


def _whole_mask(mask: torch.Tensor, like: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """The mask in the scores' shape (batch, heads, targets, sources); type 0 is per target and source, 1 per source."""
    if mask.shape != like.shape and mask_type == 1 and like.dim() == 4:
        mask = mask.view(mask.size(0), 1, 1, mask.size(-1))
    return mask.expand(like.shape)


def masked_softmax(
    self: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> torch.Tensor:
    """Softmax over what the mask leaves in; a row with nothing left is 0."""
    if mask.dtype is not torch.bool:
        raise RuntimeError("Mask should be a boolean tensor")
    left_out = _whole_mask(mask, self, mask_type)
    whole = self.masked_fill(left_out, -math.inf).softmax(-1 if dim is None else dim)
    return whole.masked_fill(left_out, 0.0)


def masked_softmax_backward(
    grad_output: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    grad = grad_output.masked_fill(mask.expand(output.shape), 0.0)
    backward = aten._softmax_backward_data.default
    made: torch.Tensor = backward(grad, output, -1 if dim is None else dim, output.dtype)
    return made


def register(library: torch.library.Library) -> None:
    for name, rule in (("_softmax", SOFTMAX), ("_log_softmax", LOG_SOFTMAX)):
        op = getattr(aten, name).default
        register_with_out(library, op, _forward(op, rule))
    for name, rule in (
        ("_softmax_backward_data", SOFTMAX_BACKWARD),
        ("_log_softmax_backward_data", LOG_SOFTMAX_BACKWARD),
    ):
        op = getattr(aten, name).default
        register_with_out(library, op, _backward(op, rule))
    library.impl("_masked_softmax", masked_softmax, "PrivateUse1")
    library.impl("_masked_softmax_backward", masked_softmax_backward, "PrivateUse1")
