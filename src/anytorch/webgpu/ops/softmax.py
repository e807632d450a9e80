"""Softmax and log-softmax in one launch each, forward and backward."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, open_runtime
from anytorch.gpu.wgsl.rows import Input, Rows, render
from anytorch.gpu.wgsl.softmax import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD, RowRule
from anytorch.gpu.wgsl.types import KINDS
from anytorch.webgpu.copies import contiguous
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.ops.reductions import (
    buffers,
    element_offset,
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

    `row_outputs` are expressions and the f32 tensors, one element per row, they are written to.
    """
    runtime = open_runtime()
    lanes = KINDS[name_of(dtype)].lanes
    written = dtype if inner == 1 and length % lanes == 0 else word_dtype(dtype)
    made = new_contiguous(size, written)
    if made.numel() == 0:
        return narrowed(made, dtype)
    group = not runtime.adapter.software and length > 32 and (inner == 1 or rows < 4096)
    kernel = _describe(
        rule,
        tuple(Input(name_of(t.dtype), per) for t, per in inputs),
        name_of(written),
        tuple(expression for expression, _ in row_outputs),
        len(extras),
        len(scalars),
        inner != 1,
        64 if not group or length <= 512 else 256,
        group,
        group and has_subgroups(runtime),
    )
    tensors = [t for t, _ in inputs]
    immediates = struct.pack(
        f"<{3 + len(tensors) + len(extras)}I{len(scalars)}f",
        rows,
        length,
        inner,
        *[element_offset(t) for t in tensors],
        *extras,
        *scalars,
    )
    x, y = grid(rows if group else -(-rows // kernel.threads))
    bound = buffers(runtime, [*tensors, made, *[t for _, t in row_outputs]])
    runtime.dispatch(_program(runtime, kernel), bound, immediates, x, y)
    return narrowed(made, dtype)


@cache
def _describe(
    rule: RowRule,
    inputs: tuple[Input, ...],
    dtype: str,
    row_outputs: tuple[str, ...],
    extras: int,
    scalars: int,
    strided: bool,
    threads: int,
    group: bool,
    subgroups: bool,
) -> Rows:
    return Rows(
        rule.reducer,
        inputs,
        rule.enter,
        rule.prepare,
        rule.output,
        dtype,
        row_outputs,
        extras,
        scalars,
        strided,
        threads,
        group,
        subgroups,
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
    def kernel(self: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        runtime = open_runtime()
        dtype = torch.float32 if half_to_float else self.dtype
        if not self.is_floating_point() or not usable(runtime, self.dtype):
            return fallback(op, self, dim, half_to_float)
        infer(op, self, dim, False)
        return run_rows(rule, [(contiguous(self), "element")], *row_geometry(self, dim), self.shape, dtype)

    return kernel


def _backward(op: Any, rule: RowRule) -> Callable[..., Any]:
    def kernel(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        if not usable(open_runtime(), grad.dtype, output.dtype, input_dtype):
            return fallback(op, grad, output, dim, input_dtype)
        on_webgpu(op, grad, output)
        inputs = [(contiguous(grad), "element"), (contiguous(output), "element")]
        return run_rows(rule, inputs, *row_geometry(grad, dim), grad.shape, input_dtype)

    return kernel


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
