"""Softmax and log-softmax in one launch each, forward and backward."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT
from anytorch.gpu.native import BindingTooLarge
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
    grid,
    has_subgroups,
    infer,
    narrowed,
    on_webgpu,
    register_with_out,
    usable,
    word_dtype,
)
from anytorch.webgpu.pieces import TooLarge
from anytorch.webgpu.pointwise import name_of
from anytorch.webgpu.tensors import aten, contiguous_strides, new_contiguous, sized_tensor, storage_nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a launch but its tensors."""

    program: Program
    x: int
    y: int
    written: torch.dtype
    head: bytes  # rows, length, inner
    shifts: tuple[int, ...]  # log2 of the inputs' element sizes
    pack: Callable[..., bytes]  # the inputs' offsets
    tail: bytes  # extras and scalars

    def launch(self, addresses: Sequence[int], made: torch.Tensor, *row_outputs: int) -> None:
        runtime = open_runtime()
        table = runtime.buffers
        bound = [table[address >> SHIFT] for address in (*addresses, made.data_ptr(), *row_outputs)]
        offsets = [(address & OFFSET_MASK) >> shift for address, shift in zip(addresses, self.shifts, strict=True)]
        try:
            runtime.dispatch(self.program, bound, self.head + self.pack(*offsets) + self.tail, self.x, self.y)
        except BindingTooLarge as exc:
            raise TooLarge from exc


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_HELD = 4  # quads per thread that stay in registers
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
    addresses = [tensor.data_ptr() for tensor, _ in inputs]
    if not all(addresses):  # an empty tensor: nothing to compute
        return new_contiguous(size, dtype)
    misaligned = 0
    for address, (_, per) in zip(addresses, inputs, strict=True):
        if per != "row":
            misaligned |= address & 15
    key = (
        *(rule, rows, length, inner, dtype, extras, scalars, misaligned == 0),
        *[(tensor.dtype, per) for tensor, per in inputs],
    )
    plan = _plans.get(key)
    if plan is None:
        outputs = tuple(expression for expression, _ in row_outputs)
        kinds = tuple(Input(name_of(t.dtype), per) for t, per in inputs)
        plan = _plans[key] = _make_plan(
            open_runtime(), rule, kinds, rows, length, inner, dtype, outputs, extras, scalars, not misaligned
        )
    made = new_contiguous(size, plan.written)
    plan.launch(addresses, made, *[tensor.data_ptr() for _, tensor in row_outputs])
    return made if plan.written is dtype else narrowed(made, dtype)


class Rowwise:
    """A row rule without row outputs on dense tensors whose geometry and alignment are known: only addresses change."""

    __slots__ = ("dtype", "nbytes", "plan", "result")

    def __init__(
        self,
        rule: RowRule,
        inputs: Sequence[tuple[torch.Tensor, str]],
        geometry: tuple[int, int, int],
        size: Sequence[int],
        dtype: torch.dtype,
        scalars: tuple[float, ...] = (),
    ) -> None:
        kinds = tuple(Input(name_of(tensor.dtype), per) for tensor, per in inputs)
        aligned = not any(tensor.data_ptr() & 15 for tensor, _ in inputs)
        self.plan = _make_plan(open_runtime(), rule, kinds, *geometry, dtype, (), (), scalars, aligned)
        self.result = (tuple(size), tuple(contiguous_strides(size)), self.plan.written)
        self.nbytes = storage_nbytes(*self.result)
        self.dtype = dtype

    def __call__(self, *addresses: int) -> torch.Tensor:
        made = sized_tensor(*self.result, self.nbytes)
        plan = self.plan
        plan.launch(addresses, made)
        return made if plan.written is self.dtype else narrowed(made, self.dtype)


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
    threads = 64 if not group or elements <= 256 else 256
    held = 0
    if quads and group:  # a subgroup is of 32 as a rule
        held = min(-(-elements // 32), 2 * MOST_HELD) if slots else min(-(-elements // threads), MOST_HELD)
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
        threads=threads,
        group=group,
        subgroups=group and has_subgroups(runtime),
        slots=slots,
        quads=quads,
        held=held,
        twice=rule.twice,
    )
    x, y = grid(-(-rows // SLOTS) if slots else rows if group else -(-rows // kernel.threads))
    return Plan(
        _program(runtime, kernel),
        x,
        y,
        written,
        struct.pack("<3I", rows, length, inner),
        tuple(KINDS[i.dtype].nbytes.bit_length() - 1 for i in inputs),
        struct.Struct(f"<{len(inputs)}I").pack,
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
    known: dict[Any, Rowwise] = device_memory()

    def kernel(self: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        address = self.data_ptr()
        key = (self.dtype, self.size(), self.stride(), dim, half_to_float, address & 15)
        found = known.get(key)
        if found is not None:
            return found(address)
        infer(op, self, dim, False)  # torch's own errors
        if not (self.is_floating_point() and usable(open_runtime(), self.dtype)):
            return fallback(op, self, dim, half_to_float)
        dtype = torch.float32 if half_to_float else self.dtype
        geometry = row_geometry(self, dim)
        if address and self.is_contiguous():
            known[key] = Rowwise(rule, ((self, "element"),), geometry, self.size(), dtype)
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
