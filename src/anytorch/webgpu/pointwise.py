"""Elementwise ops: an op is an expression; sizes, strides, dtypes and errors are torch's own.

The first call of an op with some geometry makes a plan: torch computes the result's size, stride and dtype on meta tensors
(and raises its own errors), the generator renders the shader. Later calls find the plan by a tuple and only pack numbers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, TAG, Buffer
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP, Elementwise, collapse, render
from anytorch.gpu.wgsl.functions import computable
from anytorch.gpu.wgsl.types import KINDS, convert, supported
from anytorch.webgpu.tensors import NAME, is_ours, new_contiguous, sized_tensor, storage_nbytes

MOST_GROUPS = 65_535
STREAM = 1 << 22  # elements from which a kernel is limited by memory, and several loads per thread keep more of it busy
STREAM_UNROLL = 4

Compute = Literal["promote", "float", "output", "input"]


@dataclass(frozen=True, eq=False)
class Rule:
    """How an op computes one element.

    `expression` has {0}, {1}, … for the op's operands (tensors and numbers, in schema order), already in the type it is
    computed in; it may be a function of the op's remaining arguments, for ops that have modes. `short` is used when the
    call leaves out the last operand (the `alpha` of an addition, nearly always).

    `compute`: the operands' common dtype ("promote"), the same but integers become floats ("float"), the result's dtype
    ("output"), or the first operand's ("input").
    """

    expression: str | Callable[..., str]
    compute: Compute = "promote"
    short: str | None = None


class Plan:
    """All that does not change between two calls with the same geometry."""

    __slots__ = (
        "dtype",
        "expanded",
        "from_starts",
        "head",
        "in_place",
        "nbytes",
        "pack",
        "program",
        "shifts",
        "size",
        "stride",
        "tail",
        "x",
        "y",
    )

    def __init__(
        self,
        *,
        program: Program,
        in_place: Program | None,
        x: int,
        y: int,
        pack: Callable[..., bytes],
        tail: bytes,
        from_starts: bytes,
        head: tuple[int, int],
        shifts: tuple[int, ...],
        size: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        expanded: tuple[tuple[int, ...], ...],
    ) -> None:
        self.program = program
        self.in_place = in_place  # the same with an input's buffer as the output's
        self.x = x  # groups; 0: nothing to compute
        self.y = y
        self.pack = pack
        self.tail = tail  # sizes and strides
        self.from_starts = from_starts  # the parameters when every operand starts its buffer, as most do
        self.head = head  # elements, threads per row of groups
        self.shifts = shifts  # log2 of each operand's element size
        self.size = size
        self.stride = stride
        self.dtype = dtype
        self.nbytes = storage_nbytes(size, stride, dtype)
        self.expanded = expanded  # every operand's strides over the result's size


_INDEX = re.compile(r"\bi\b")  # the expression asks for the element's place in the output
_plans: dict[Any, Plan | None] = device_memory()
_UNKNOWN: Any = object()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype)[6:]  # "torch.float32"


def pair_kernel(seen: dict[Any, Plan], rule: Rule, op: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an op of two operands. Most calls by far have two tensors of ours, seen before: the hot path of the
    device, all of which is paid by every small op, so it calls as little Python as it can."""

    def kernel(a: Any, b: Any = _UNKNOWN, *rest: Any, **options: Any) -> Any:
        if rest or options or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return otherwise(a, *(() if b is _UNKNOWN else (b,)), *rest, **options)
        first, second = a.data_ptr(), b.data_ptr()
        if not first & second & TAG:
            return otherwise(a, b)
        plan = seen.get((a.dtype, a.size(), a.stride(), b.dtype, b.size(), b.stride(), (first | second) & 15))
        if plan is None:
            result = otherwise(a, b)
            remember_pair(seen, rule, op, a, b)
            return result
        out = sized_tensor(plan.size, plan.stride, plan.dtype, plan.nbytes)
        runtime = open_runtime()
        table = runtime.buffers
        if (first | second) & OFFSET_MASK:
            one, other, _ = plan.shifts
            offsets = (first & OFFSET_MASK) >> one, (second & OFFSET_MASK) >> other, 0  # a new tensor starts its buffer
            immediates = plan.pack(*plan.head, *offsets) + plan.tail
        else:
            immediates = plan.from_starts
        try:
            runtime.dispatch(
                plan.program,
                (table[first >> SHIFT], table[second >> SHIFT], table[out.data_ptr() >> SHIFT]),
                immediates,
                plan.x,
                plan.y,
            )
        except BindingTooLarge:
            _in_windows(rule, op, (a, b), (), out, None)
        return out

    return kernel


def remember_pair(seen: dict[Any, Plan], rule: Rule, op: Any, a: Any, b: Any) -> None:
    """Let `pair_kernel` find the plan that `run` has just made or found for these two."""
    if is_ours(a) and is_ours(b):
        geometry = (a.dtype, a.size(), a.stride(), b.dtype, b.size(), b.stride(), (a.data_ptr() | b.data_ptr()) & 15)
        plan = _plans.get((rule, op, (), *geometry))
        if plan is not None and plan.x:
            seen[geometry] = plan


def run(
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...] = (),
    out: torch.Tensor | None = None,
    call: Callable[[], Any] | None = None,
    windows: tuple[tuple[int, int], ...] | None = None,
) -> torch.Tensor | None:
    """Compute `rule` over `operands` into `out`, or into a new tensor. None: no shader can (the caller falls back).

    `call` re-runs the op on meta tensors when a plan is made; it is how torch's own errors and result types arise.
    `windows` are the (offset, nbytes) of each operand's binding, for buffers larger than one binding may be.
    """
    key: list[Any] = [rule, op, modes]
    tensors: list[torch.Tensor] = []
    pointers: list[int] = []
    scalars: list[Any] = []
    bits = 0
    for value in operands:
        if isinstance(value, torch.Tensor):
            pointer = value.data_ptr()
            if pointer & TAG or value.device.type == NAME:  # a tensor without elements has no address
                tensors.append(value)
                pointers.append(pointer)
                bits |= pointer
                key += (value.dtype, value.size(), value.stride())
                continue
            value = _host_scalar(op, value)
            key.append("tensor")
        kind = type(value)
        key += (kind, kind is int and not -(2**31) <= value < 2**31)
        scalars.append(value)
    if out is not None:
        address = out.data_ptr()
        bits |= address
        key += (out.dtype, out.size(), out.stride())
    key.append(bits & 15)
    identity = tuple(key)
    plan = _plans.get(identity, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = _plans[identity] = _make_plan(open_runtime(), rule, op, operands, modes, out, bits & 15, call)
    if plan is None:
        return None
    if out is None:
        out = sized_tensor(plan.size, plan.stride, plan.dtype, plan.nbytes)
        address = out.data_ptr()
    if not plan.x:
        return out
    runtime = open_runtime()
    table = runtime.buffers
    shifts = plan.shifts
    target = table[address >> SHIFT]
    program = plan.program
    buffers: list[Buffer] = []
    offsets: list[int] = []
    i = 0
    for pointer in pointers:
        buffer = table[pointer >> SHIFT]
        if buffer is target:
            same = pointer == address and tensors[i].dtype is out.dtype and plan.expanded[i] == plan.expanded[-1]
            if not same or plan.in_place is None:
                return _beside(rule, op, operands, modes, out, call)
            program = plan.in_place
        buffers.append(buffer)
        offsets.append((pointer & OFFSET_MASK) >> shifts[i])
        i += 1
    buffers.append(target)
    offsets.append((address & OFFSET_MASK) >> shifts[i])
    if windows is not None:
        offsets = [o - (w[0] >> shift) for o, w, shift in zip(offsets, windows, shifts, strict=True)]
    immediates = plan.pack(*plan.head, *scalars, *offsets) + plan.tail
    try:
        runtime.dispatch(program, buffers, immediates, plan.x, plan.y, windows=windows)
    except BindingTooLarge:
        if windows is not None:
            raise
        _in_windows(rule, op, operands, modes, out, call)
    return out


def _in_windows(
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...],
    out: torch.Tensor,
    call: Callable[[], Any] | None,
) -> None:
    """Compute in parts small enough that each operand's part fits into one binding of its buffer."""
    runtime = open_runtime()
    limit = runtime.binding_limit
    parts: list[Any] = [v.expand(out.shape) if is_ours(v) else v for v in operands]
    spans = [_span(t) for t in (*[p for p in parts if is_ours(p)], out)]
    if max(last - first for first, last in spans) + 2 * WINDOW_STEP <= limit:
        windows = tuple(
            _window(span, runtime.buffers[t.data_ptr() >> SHIFT].nbytes)
            for span, t in zip(spans, (*[p for p in parts if is_ours(p)], out), strict=True)
        )
        run(rule, op, parts, modes, out, call, windows)
        return
    sizes, strides = list(out.shape), list(out.stride())
    longest = max(range(len(sizes)), key=lambda d: sizes[d] * max(strides[d], 1) if sizes[d] > 1 else 0)
    half = sizes[longest] // 2
    for start, length in ((0, half), (half, sizes[longest] - half)):
        _in_windows(
            rule,
            op,
            [p.narrow(longest, start, length) if is_ours(p) else p for p in parts],
            modes,
            out.narrow(longest, start, length),
            call,
        )


WINDOW_STEP = 256  # bindings start on multiples of this on every adapter


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (past the end) of its buffer that a tensor touches."""
    first = tensor.data_ptr() & OFFSET_MASK
    return first, first + storage_nbytes(tensor.size(), tensor.stride(), tensor.dtype)


def _window(span: tuple[int, int], buffer_nbytes: int) -> tuple[int, int]:
    start = span[0] // WINDOW_STEP * WINDOW_STEP
    return start, min(-(-span[1] // 16) * 16, buffer_nbytes) - start


def _host_scalar(op: Any, value: torch.Tensor) -> Any:
    """A CPU tensor among ours is allowed if it is a single number, as on every device of torch's."""
    if value.dim():
        raise RuntimeError(
            f"{op}: expected all tensors to be on {NAME}, but one is on {value.device}; move it with .to('{NAME}')"
        )
    return value.item()


def _beside(
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...],
    out: torch.Tensor,
    call: Callable[[], Any] | None,
) -> torch.Tensor:
    """Some thread would read what another has already overwritten: compute into a new tensor, then copy."""
    beside = new_contiguous(out.size(), out.dtype)
    run(rule, op, operands, modes, beside, call)
    run(COPY, _copy_op, (beside,), (), out)
    return out


COPY = Rule("{0}", compute="input")
_copy_op = torch.ops.aten.copy_.default


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
    if out is not None and any(length > 1 and not step for length, step in zip(size, stride, strict=True)):
        raise RuntimeError(  # torch's own words
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    tensors = [v for v in operands if isinstance(v, torch.Tensor) and v.device.type == NAME]
    compute = compute_dtype(rule, operands, dtype)
    dtypes = [name_of(t.dtype) for t in tensors]
    names = {*dtypes, name_of(dtype), name_of(compute)}
    if not all(supported(name, runtime.features) for name in names):
        return None
    scalar_types, pack_scalars = _scalars(operands, compute)
    expression = rule.expression if isinstance(rule.expression, str) else rule.expression(*modes)
    if rule.short is not None and f"{{{len(operands)}}}" in expression:
        expression = rule.short
    filled = _fill(expression, operands, name_of(compute), name_of(dtype))
    if not computable(filled, KINDS[name_of(compute)].compute):
        return None
    elements = 1
    for length in size:
        elements *= length
    expanded = (*[tuple(t.expand(size).stride()) for t in tensors], tuple(stride))
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
        vector=bool(tensors)
        and contiguous
        and not misaligned
        and elements % 4 == 0
        and wide
        and _INDEX.search(filled) is None,
        unroll=STREAM_UNROLL if elements >= STREAM and not runtime.adapter.software else 1,
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
    head = (elements, x * WORKGROUP)
    pack = _packer(pack_scalars, len(tensors) + 1)
    return Plan(
        program=_program(runtime, kernel),
        in_place=in_place,
        x=x,
        y=y,
        pack=pack,
        tail=tail,
        from_starts=b"" if pack_scalars else pack(*head, *[0] * (len(tensors) + 1)) + tail,
        head=head,
        shifts=(*[t.dtype.itemsize.bit_length() - 1 for t in tensors], dtype.itemsize.bit_length() - 1),
        size=tuple(size),
        stride=tuple(stride),
        dtype=dtype,
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


def compute_dtype(rule: Rule, operands: Sequence[Any], result: torch.dtype) -> torch.dtype:
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
    numbers = [v for v in operands if not (isinstance(v, torch.Tensor) and v.device.type == NAME)]
    return (kind,) * len(numbers), (kind,) * len(numbers)


_F32 = struct.Struct("f")
_U32 = struct.Struct("I")


def _packer(kinds: tuple[str, ...], operands: int) -> Callable[..., bytes]:
    if not kinds:
        return struct.Struct(f"{2 + operands}I").pack
    codes = {"f32": "f", "i32": "i", "i64": "q", "f64": "d"}
    whole = struct.Struct("<2I" + "".join(codes[kind] for kind in kinds) + f"{operands}I")
    count = len(kinds)
    to_float = kinds[0] == "f32"

    def pack(n: int, row: int, *values: Any) -> bytes:
        numbers = values[:count]
        if to_float:
            converted = [clip(v) for v in numbers]
        elif kinds[0] == "f64":
            converted = [float(v) for v in numbers]
        elif kinds[0] == "i32":
            converted = [(int(v) + 2**31) % 2**32 - 2**31 for v in numbers]
        else:
            converted = [(int(v) + 2**63) % 2**64 - 2**63 for v in numbers]
        return whole.pack(n, row, *converted, *values[count:])

    return pack


def clip(value: float) -> float:
    """A Python float as the nearest float32; beyond its range it is infinite, which struct refuses to do."""
    value = float(value)
    if value > 3.4028235677973366e38:
        return float("inf")
    if value < -3.4028235677973366e38:
        return float("-inf")
    return value


def _fill(expression: str, operands: Sequence[Any], compute: str, result: str) -> str:
    """The expression with its operands put in, converted to the type it computes in, and its value to the result's."""
    values = []
    tensor = number = 0
    for value in operands:
        if isinstance(value, torch.Tensor) and value.device.type == NAME:
            values.append(f"({convert(f'x{tensor}', name_of(value.dtype), compute)})")
            tensor += 1
        else:
            scalar = f"s{number}()"
            if compute in ("uint8", "int8", "int16"):  # numbers wrap round as elements do
                scalar = convert(scalar, "int32", compute)
            values.append(scalar)
            number += 1
    return put_in(expression, values, compute, result)


def put_in(expression: str, values: Sequence[str], compute: str, result: str) -> str:
    """An expression with the texts of its operands, which are in the compute type of dtype `compute` already."""
    kind = KINDS[compute].compute
    filled = expression.replace("{T}", kind)
    for i, value in enumerate(values):
        filled = filled.replace(f"{{{i}}}", value)
    if "{bool}" in filled:  # the expression is a condition: 1 or 0 whatever the type it was computed in
        return convert(f"select(0, 1, {filled.replace('{bool}', '')})", "bool", result)
    if compute == "bool":  # what was added or multiplied may be more than 1 now
        filled = f"select(0, 1, ({filled}) != 0)"
    return convert(f"({filled})", compute, result)
