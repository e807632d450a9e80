"""Elementwise ops: an op is an expression; sizes, strides, dtypes and errors are torch's own.

The first call of an op with some geometry makes a plan: torch computes the result's size, stride and dtype on meta tensors
(and raises its own errors), the generator renders the shader. Later calls find the plan by a tuple and only pack numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, Buffer
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, open_runtime
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP, Elementwise, collapse, render
from anytorch.gpu.wgsl.types import KINDS, convert, load, supported
from anytorch.webgpu.tensors import NAME, new_contiguous, new_tensor

MOST_GROUPS = 65_535

Compute = Literal["promote", "float", "output", "input"]


@dataclass(frozen=True, eq=False)
class Rule:
    """How an op computes one element.

    `expression` has {0}, {1}, … for the op's operands (tensors and numbers, in schema order), already in the type it is
    computed in; it may be a function of the op's remaining arguments ({} for none), for ops that have modes.

    `compute`: the operands' common dtype ("promote"), the same but integers become floats ("float"), the result's dtype
    ("output"), or the first operand's ("input").
    """

    expression: str | Callable[..., str]
    compute: Compute = "promote"


@dataclass(frozen=True)
class Plan:
    """All that does not change between two calls with the same geometry."""

    program: Program
    in_place: Program | None
    x: int
    y: int
    pack: Callable[..., bytes]
    tail: bytes  # sizes and strides
    head: tuple[int, int]  # elements, threads per row of groups
    shifts: tuple[int, ...]  # log2 of each operand's element size
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    operands: tuple[int, ...]  # which of the tensors are bound
    expanded: tuple[tuple[int, ...], ...]


_plans: dict[Any, Plan | None] = {}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype)[6:]  # "torch.float32"


def run(
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...] = (),
    out: torch.Tensor | None = None,
    call: Callable[[], Any] | None = None,
) -> torch.Tensor | None:
    """Compute `rule` over `operands` into `out`, or into a new tensor. None: no shader can (the caller falls back).

    `call` re-runs the op on meta tensors when a plan is made; it is how torch's own errors and result types arise.
    """
    runtime = open_runtime()
    key: list[Any] = [rule, op, modes]
    tensors: list[torch.Tensor] = []
    scalars: list[int] = []
    bits = 0
    for value in operands:
        if isinstance(value, torch.Tensor):
            if value.device.type == NAME:
                tensors.append(value)
                bits |= value.data_ptr()
                key.append((value.dtype, value.size(), value.stride()))
                continue
            if value.dim():
                raise RuntimeError(
                    f"{op}: expected all tensors to be on {NAME}, but one is on {value.device}; move it with .to('{NAME}')"
                )
            value = value.item() if value.dtype is not torch.bool else bool(value.item())
            key.append("tensor")
        kind = type(value)
        large = kind is int and not -(2**31) <= value < 2**31
        key.append((kind, large))
        scalars.append(value)
    if out is not None:
        bits |= out.data_ptr()
        key.append((out.dtype, out.size(), out.stride()))
    key.append(bits & 15)
    identity = tuple(key)
    plan = _plans.get(identity, False)
    if plan is False:
        plan = _plans[identity] = _make_plan(runtime, rule, op, operands, modes, out, bits & 15, call)
    if plan is None:
        return None
    assert isinstance(plan, Plan)
    if out is None:
        out = new_tensor(plan.size, plan.stride, plan.dtype)
    if not plan.x:
        return out
    return _launch(runtime, plan, rule, op, operands, modes, tensors, scalars, out, call)


def _launch(
    runtime: Runtime,
    plan: Plan,
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...],
    tensors: list[torch.Tensor],
    scalars: list[Any],
    out: torch.Tensor,
    call: Callable[[], Any] | None,
) -> torch.Tensor:
    buffers: list[Buffer] = []
    offsets: list[int] = []
    table = runtime.buffers
    shifts = plan.shifts
    address = out.data_ptr()
    target = table[address >> SHIFT]
    program = plan.program
    for i, tensor in enumerate(tensors):
        pointer = tensor.data_ptr()
        buffer = table[pointer >> SHIFT]
        if buffer is target:
            same = pointer == address and tensor.dtype is out.dtype and plan.expanded[i] == plan.expanded[-1]
            if not same or plan.in_place is None:
                # Some thread would read what another has already overwritten: compute beside, then copy.
                beside = new_contiguous(out.size(), out.dtype)
                run(rule, op, operands, modes, beside, call)
                from anytorch.webgpu.copies import on_device  # noqa: PLC0415  (copies are pointwise ops themselves)

                return on_device(beside, out)
            program = plan.in_place
        buffers.append(buffer)
        offsets.append((pointer & OFFSET_MASK) >> shifts[i])
    buffers.append(target)
    offsets.append((address & OFFSET_MASK) >> shifts[-1])
    immediates = plan.pack(*plan.head, *scalars, *offsets) + plan.tail
    runtime.dispatch(program, buffers, immediates, plan.x, plan.y)
    return out


def _make_plan(
    runtime: Runtime,
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...],
    out: torch.Tensor | None,
    misaligned: int,
    call: Callable[[], Any] | None,
) -> Plan | None:
    size, stride, dtype = _result(op, operands, out, call)
    tensors = [v for v in operands if isinstance(v, torch.Tensor) and v.device.type == NAME]
    compute = _compute_dtype(rule, operands, dtype)
    dtypes = [name_of(t.dtype) for t in tensors]
    names = {*dtypes, name_of(dtype), name_of(compute)}
    if not all(supported(name, runtime.features) for name in names):
        return None
    scalar_types, pack_scalars = _scalars(operands, compute)
    expression = rule.expression if isinstance(rule.expression, str) else rule.expression(*modes)
    filled = _fill(expression, operands, name_of(compute), name_of(dtype))
    if filled is None:
        return None
    elements = 1
    for length in size:
        elements *= length
    expanded = tuple(tuple(t.expand(size).stride()) for t in tensors) + (tuple(stride),)
    sizes, strides = collapse(size, expanded)
    contiguous = not sizes or (len(sizes) == 1 and all(steps[0] == 1 for steps in strides))
    lanes = KINDS[name_of(dtype)].lanes
    dense_words = contiguous and not misaligned and (elements % lanes == 0 or out is None)
    wide = all(KINDS[name].lanes == 1 and KINDS[name].nbytes in (2, 4) for name in (*dtypes, name_of(dtype)))
    kernel = Elementwise(
        filled,
        tuple(dtypes),
        name_of(dtype),
        scalar_types,
        rank=0 if contiguous else len(sizes),
        vector=bool(tensors) and contiguous and not misaligned and elements % 4 == 0 and wide,
        atomic=lanes > 1 and not dense_words,
    )
    if kernel.words > MOST_WORDS:  # a rank too high for the parameters: its own shader
        kernel = Elementwise(
            filled,
            tuple(dtypes),
            name_of(dtype),
            scalar_types,
            rank=len(sizes),
            atomic=kernel.atomic,
            shape=tuple(sizes),
            strides=tuple(tuple(steps) for steps in strides),
        )
    threads = -(-elements // kernel.per_thread)
    groups = -(-threads // WORKGROUP)
    x = min(groups, MOST_GROUPS)
    y = -(-groups // x) if x else 0
    tail = b""
    if kernel.rank and not kernel.shape:
        tail = struct.pack(f"{kernel.rank * (len(strides) + 1)}I", *sizes, *[s for steps in strides for s in steps])
    in_place = None
    if tensors and not kernel.atomic:
        in_place = _program(runtime, Elementwise(**{**kernel.__dict__, "in_place": True}))
    return Plan(
        program=_program(runtime, kernel),
        in_place=in_place,
        x=x,
        y=y,
        pack=_packer(pack_scalars, len(tensors) + 1),
        tail=tail,
        head=(elements, x * WORKGROUP),
        shifts=tuple(t.dtype.itemsize.bit_length() - 1 for t in tensors) + (dtype.itemsize.bit_length() - 1,),
        size=tuple(size),
        stride=tuple(stride),
        dtype=dtype,
        operands=tuple(range(len(tensors))),
        expanded=expanded,
    )


def _program(runtime: Runtime, kernel: Elementwise) -> Program:
    return runtime.programs.make(
        kernel,
        lambda: render(kernel),
        buffers=len(kernel.inputs) + 1,
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )


def _result(
    op: Any, operands: Sequence[Any], out: torch.Tensor | None, call: Callable[[], Any] | None
) -> tuple[Sequence[int], Sequence[int], torch.dtype]:
    if call is None:  # a copy or a fill: the target says it all
        assert out is not None
        return out.size(), out.stride(), out.dtype
    made = call()
    if out is not None:
        return out.size(), out.stride(), out.dtype
    return made.size(), made.stride(), made.dtype


def _compute_dtype(rule: Rule, operands: Sequence[Any], result: torch.dtype) -> torch.dtype:
    if rule.compute == "output" or not operands:
        return result
    if rule.compute == "input":
        first = operands[0]
        return first.dtype if isinstance(first, torch.Tensor) else result
    kind = PROMOTION.INT_TO_FLOAT if rule.compute == "float" else PROMOTION.DEFAULT
    dtype, _ = elementwise_dtypes(*operands, type_promotion_kind=kind)
    return dtype


def _scalars(operands: Sequence[Any], compute: torch.dtype) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """WGSL types of the numbers among the operands, and how struct packs each: in the type they are computed in."""
    kind = KINDS[name_of(compute)].compute
    wgsl = {"f64": "f32"}.get(kind, kind)
    numbers = [v for v in operands if not (isinstance(v, torch.Tensor) and v.device.type == NAME)]
    return (wgsl,) * len(numbers), (wgsl,) * len(numbers)


_F32 = struct.Struct("f")
_U32 = struct.Struct("I")


def _packer(kinds: tuple[str, ...], operands: int) -> Callable[..., bytes]:
    if not kinds:
        return struct.Struct(f"{2 + operands}I").pack
    codes = {"f32": "f", "i32": "i", "i64": "q"}
    whole = struct.Struct("<2I" + "".join(codes[kind] for kind in kinds) + f"{operands}I")
    count = len(kinds)
    to_float = kinds[0] == "f32"

    def pack(n: int, row: int, *values: Any) -> bytes:
        numbers = values[:count]
        if to_float:
            converted = [_clip(v) for v in numbers]
        elif kinds[0] == "i32":
            converted = [(int(v) + 2**31) % 2**32 - 2**31 for v in numbers]
        else:
            converted = [(int(v) + 2**63) % 2**64 - 2**63 for v in numbers]
        return whole.pack(n, row, *converted, *values[count:])

    return pack


def _clip(value: float) -> float:
    """A Python float as the nearest float32; beyond its range it is infinite, which struct refuses to do."""
    value = float(value)
    if value > 3.4028235677973366e38:
        return float("inf")
    if value < -3.4028235677973366e38:
        return float("-inf")
    return value


def _fill(expression: str, operands: Sequence[Any], compute: str, result: str) -> str | None:
    """The expression with its operands put in, converted to the type it computes in, and its value to the result's."""
    values = []
    tensor = number = 0
    for value in operands:
        if isinstance(value, torch.Tensor) and value.device.type == NAME:
            values.append(f"({convert(f'x{tensor}', name_of(value.dtype), compute)})")
            tensor += 1
        else:
            scalar = f"s{number}()"
            values.append(f"f64({scalar})" if compute == "float64" else scalar)
            number += 1
    kind = KINDS[compute].compute
    filled = expression.replace("{T}", kind)
    for i, value in enumerate(values):
        filled = filled.replace(f"{{{i}}}", value)
    if "{bool}" in filled:  # the expression is a condition: 1 or 0 whatever the type it was computed in
        return f"select(0, 1, {filled.replace('{bool}', '')})" if result == "bool" else None
    return convert(f"({filled})", compute, result)


__all__ = ["Plan", "Rule", "load", "run"]
