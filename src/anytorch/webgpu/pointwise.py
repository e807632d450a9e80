"""Elementwise ops: an op is an expression; sizes, strides, dtypes and errors are torch's own.

The first call of an op with some geometry makes a plan: torch computes the result's size, stride and dtype on meta tensors
(and raises its own errors), the generator renders the shader. Later calls find the plan by a tuple and only pack numbers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, TAG
from anytorch.gpu.launch import Plan
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import functions
from anytorch.gpu.wgsl.elementwise import MOST_WORDS, WORKGROUP, Elementwise, collapse, render
from anytorch.gpu.wgsl.types import KINDS, convert
from anytorch.webgpu.dtypes import cannot_cast, computable, name_of
from anytorch.webgpu.launch import (
    NoKernel,
    check_devices,
    check_partly,
    check_writable,
    expanded,
    once,
    plan_over,
    result_of,
)
from anytorch.webgpu.oversize import Windows, in_windows
from anytorch.webgpu.tensors import NAME, is_ours, new_contiguous, sized_tensor

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
    constant: bool = (
        False  # elements in one place get the same value, as a fill's do: in place, torch lets them through
    )
    rounded: bool = (
        False  # numbers are rounded to a half type before they are used, as in torch where a step depends on them
    )
    scales: bool = False  # a second operand of one element is not rounded: products and quotients by a float32


_PLACE = re.compile(r"\{\d\}")
_INDEX = re.compile(r"\bi\b")  # the expression asks for the element's place in the output
_LEFT_OUT: Any = object()

# What a call may find instead of a plan.
UNABLE = "no shader can compute this"


@dataclass(frozen=True)
class Beside:
    """Computed into a tensor of its own and copied: in place, a thread would read what another has already overwritten; or
    torch computes in a narrower dtype than the one the result is put into."""

    dtype: torch.dtype


def pair_kernel(rule: Rule, op: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an op of two operands. Most calls by far have two tensors of ours, seen before: the hot path of the
    device, all of which is paid by every small op, so it does what `run` and `Plan` do with as few calls as it can."""
    name = id(op)

    def kernel(a: Any, b: Any = _LEFT_OUT, *rest: Any, **options: Any) -> Any:
        if rest or options or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return otherwise(a, *(() if b is _LEFT_OUT else (b,)), *rest, **options)
        first, second = a.data_ptr(), b.data_ptr()
        bits = first | second
        plan = plans[rule, name, (), a.dtype, a.size(), a.stride(), b.dtype, b.size(), b.stride(), bits & 15]
        if type(plan) is not Plan or not first & second & TAG:
            return otherwise(a, b)
        out = sized_tensor(*plan.result)
        runtime = plan.runtime
        table = runtime.buffers
        if bits & OFFSET_MASK:
            one, other, _ = plan.shifts
            places = (first & OFFSET_MASK) >> one, (second & OFFSET_MASK) >> other, 0  # a new tensor starts its buffer
            immediates = plan.head + plan.pack(*places) + plan.tail
        else:
            immediates = plan.at_starts
        try:
            runtime.dispatch(
                plan.program,
                (table[first >> SHIFT], table[second >> SHIFT], table[out.data_ptr() >> SHIFT]),
                immediates,
                plan.x,
                plan.y,
            )
        except BindingTooLarge:
            _in_parts(rule, op, (a, b), (), out, None)
        return out

    return kernel


def run(
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...] = (),
    out: torch.Tensor | None = None,
    call: Callable[[], Any] | None = None,
    windows: Windows | None = None,
) -> torch.Tensor:
    """Compute `rule` over `operands` into `out`, or into a new tensor. NoKernel: no shader can (the caller falls back).

    `call` re-runs the op on meta tensors when a plan is made; it is how torch's own errors and result types arise.
    `windows` are the (offset, nbytes) of each operand's binding, for buffers larger than one binding may be.
    """
    identity, addresses, scalars, bits, shared = _identity(rule, op, operands, modes, out)
    address = out.data_ptr() if out is not None else 0
    plan = plans[identity]
    if shared and windows is None and (plan is None or shared & _ELSEWHERE):
        assert out is not None
        check_partly(out, operands)
    if plan is None:
        if rule.constant and out is not None and expanded(out):
            places = once(out)
            run(rule, op, [places if v is out else v for v in operands], modes, places)
            return out
        plan = plans[identity] = _make_plan(rule, operands, modes, out, bits & 15, shared, call)
    if plan is UNABLE:
        raise NoKernel
    if type(plan) is Beside:
        assert out is not None
        beside = new_contiguous(out.size(), plan.dtype)
        run(rule, op, operands, modes, beside, call)
        return run(COPY, _copy_op, (beside,), (), out)
    if out is None:
        out = sized_tensor(*plan.result)
        address = out.data_ptr()
    if not address:  # there is nothing to compute
        return out
    addresses.append(address)
    if scalars:
        converted = _CONVERTED[plan.numbers[0]]
        scalars = [converted(value) for value in scalars]
    try:
        if windows is None:
            plan(addresses, *scalars)
        else:
            plan.within(windows, addresses, *scalars)
    except BindingTooLarge:
        if windows is not None:
            raise
        _in_parts(rule, op, operands, modes, out, call)
    return out


def plan_in_cpp(rule: Rule, op: Any, in_place: bool, *operands: Any) -> Any:
    """The plan of a call that was just made, as the C++ launcher knows it; None if it has none. C++ finds it again without
    the default dtype, and packs numbers as they are: what depends on the one or needs more than the other stays here."""
    if not _floating(operands) and (rule.compute == "float" or any(type(v) is float for v in operands)):
        return None
    plan = plans[_identity(rule, op, operands, (), operands[0] if in_place else None)[0]]
    return plan.native if type(plan) is Plan and TRUTH not in plan.numbers else None


def _identity(
    rule: Rule, op: Any, operands: Sequence[Any], modes: tuple[Any, ...], out: torch.Tensor | None
) -> tuple[tuple[Any, ...], list[int], list[Any], int, int]:
    """The key of a call's plan; the addresses of its tensors, its numbers, the addresses' bits, and which operands share the
    output's buffer."""
    key: list[Any] = [rule, id(op), modes]
    addresses: list[int] = []
    scalars: list[Any] = []
    bits = shared = 0
    for value in operands:
        if isinstance(value, torch.Tensor):
            pointer = value.data_ptr()
            if pointer & TAG or value.device.type == NAME:  # a tensor without elements has no address
                addresses.append(pointer)
                bits |= pointer
                key += (value.dtype, value.size(), value.stride())
                continue
            check_devices(op, value)  # a single number may be on the CPU, as on every device of torch's
            key.append(value.dtype)
            value = value.item()
        kind = type(value)
        if kind is float:
            key += (kind, _default_dtype())  # what an integer tensor becomes with it
        else:
            key += (kind, kind is int and not -(2**31) <= value < 2**31)
        scalars.append(value)
    if rule.compute == "float" and not _floating(operands):  # `pair_kernel` does not look for these
        key.append(_default_dtype())
    if out is not None:
        address = out.data_ptr()
        bits |= address
        for i, pointer in enumerate(addresses):
            if pointer >> SHIFT == address >> SHIFT:
                shared |= (1 if pointer == address else 2) << 2 * i  # at the same place, or elsewhere
        key += (out.dtype, out.size(), out.stride(), shared)
    key.append(bits & 15)
    return tuple(key), addresses, scalars, bits, shared


def _in_parts(
    rule: Rule,
    op: Any,
    operands: Sequence[Any],
    modes: tuple[Any, ...],
    out: torch.Tensor,
    call: Callable[[], Any] | None,
) -> None:
    """Compute in parts small enough that each operand's part fits into one binding of its buffer."""

    def launch(tensors: list[torch.Tensor], windows: Windows) -> None:
        parts = iter(tensors)
        run(rule, op, [next(parts) if is_ours(v) else v for v in operands], modes, tensors[-1], call, windows)

    in_windows([*[v.expand(out.shape) for v in operands if is_ours(v)], out], launch)


_ELSEWHERE = int("10" * 16, 2)  # an operand in the output's buffer, at another place: where, its geometry does not tell
COPY = Rule("{0}", compute="input")
_copy_op = torch.ops.aten.copy_.default


def _make_plan(
    rule: Rule,
    operands: Sequence[Any],
    modes: tuple[Any, ...],
    out: torch.Tensor | None,
    misaligned: int,
    shared: int,
    call: Callable[[], Any] | None,
) -> Plan | str | Beside:
    inferred: Any = call() if call is not None else None  # raises torch's own errors
    if any(v.is_complex() if isinstance(v, torch.Tensor) else isinstance(v, complex) for v in operands):
        return UNABLE
    expression = rule.expression if isinstance(rule.expression, str) else rule.expression(*modes)
    if out is not None and operands and rule.compute in ("promote", "float") and "{bool}" not in expression:
        promoted = _promoted(rule, operands)[1]
        if not torch.can_cast(promoted, out.dtype):  # 1.5 into integers
            raise cannot_cast(promoted, out.dtype)
        if promoted is not out.dtype and promoted in NARROW:
            return Beside(promoted)
    made: torch.Tensor = inferred if out is None else out
    size, stride, dtype = made.size(), made.stride(), made.dtype
    if out is not None and not rule.constant:
        check_writable(out)
    tensors = [v for v in operands if is_ours(v)]
    compute = compute_dtype(rule, operands, dtype)
    dtypes = [name_of(t.dtype) for t in tensors]
    if not computable(*[t.dtype for t in tensors], dtype, compute):
        return UNABLE
    if rule.short is not None and f"{{{len(operands)}}}" in expression:
        expression = rule.short
    kind = KINDS[name_of(compute)].compute
    common = _promoted(rule, operands)[1] if rule.compute in ("promote", "float") and operands else compute
    filled = _fill(expression, operands, name_of(compute), name_of(dtype), common, rule)
    if not functions.computable(filled, kind):
        return UNABLE
    elements = made.numel()
    expanded = (*[tuple(t.expand(size).stride()) for t in tensors], tuple(stride))
    sizes, strides = collapse(size, expanded)
    contiguous = not sizes or (len(sizes) == 1 and all(steps[0] == 1 for steps in strides))
    lanes = KINDS[name_of(dtype)].lanes
    dense_words = contiguous and not misaligned and (elements % lanes == 0 or out is None)
    wide = all(KINDS[name].lanes == 1 and KINDS[name].nbytes in (2, 4) for name in (*dtypes, name_of(dtype)))
    vector = bool(tensors) and contiguous and not misaligned and elements % 4 == 0 and wide
    kernel = Elementwise(
        filled,
        tuple(dtypes),
        name_of(dtype),
        (kind,) * (len(operands) - len(tensors)),  # numbers are in the type they are computed in
        rank=0 if contiguous else len(sizes),
        vector=vector and _INDEX.search(filled) is None,
        unroll=STREAM_UNROLL if elements >= STREAM and not open_runtime().adapter.software else 1,
        in_place=bool(shared),
        atomic=lanes > 1 and not dense_words,
    )
    geometry = [*sizes, *[step for steps in strides for step in steps]] if kernel.rank else []
    if kernel.words > MOST_WORDS:  # a rank too high for the parameters: its own shader
        steps = tuple(tuple(steps) for steps in strides)
        kernel = replace(kernel, rank=len(sizes), vector=False, unroll=1, shape=tuple(sizes), strides=steps)
        geometry = []
    for i, tensor in enumerate(tensors):
        if shared >> 2 * i & 3 and elements:
            same = shared >> 2 * i & 1 and tensor.dtype is dtype and expanded[i] == expanded[-1]
            if not same or kernel.atomic:
                return Beside(dtype)
    return plan_over(
        elements,
        kernel,
        render,
        [tensor.dtype.itemsize for tensor in (*tensors, made)],
        kernel.writable,
        WORKGROUP,
        kernel.per_thread,
        numbers=(TRUTH if compute is torch.bool else _CODES[kind]) * len(kernel.scalars),
        tail=geometry,
        result=result_of(size, dtype, stride),
    )


def compute_dtype(rule: Rule, operands: Sequence[Any], result: torch.dtype) -> torch.dtype:
    if rule.compute == "output" or not operands:
        return result
    if rule.compute == "input":
        first = operands[0]
        return first.dtype if isinstance(first, torch.Tensor) else result
    return _promoted(rule, operands)[0]


def _promoted(rule: Rule, operands: Sequence[Any]) -> tuple[torch.dtype, torch.dtype]:
    """What torch computes in, and the dtype it gives the result: a half type is computed in float32."""
    kind = PROMOTION.INT_TO_FLOAT if rule.compute == "float" else PROMOTION.DEFAULT
    if rule.short is not None:  # a factor: `alpha` has no say in the dtype
        operands = operands[: len(set(_PLACE.findall(rule.short)))]
    computed, result = elementwise_dtypes(*operands, type_promotion_kind=kind)
    return computed, result


# How a number is packed in the type it is computed in, and what is packed.
_CODES = {"f32": "f", "i32": "i", "i64": "q", "f64": "d"}
TRUTH = "I"  # as i32, but of a bool
_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "f": lambda value: clip(value),
    "d": float,
    "i": lambda value: (whole(value) + 2**31) % 2**32 - 2**31,
    "q": lambda value: (whole(value) + 2**63) % 2**64 - 2**63,
    TRUTH: lambda value: int(value != 0),  # a NaN is true
}


def whole(value: Any) -> int:
    """A number as an integer; what has none raises torch's own error."""
    try:
        return int(value)
    except (OverflowError, ValueError):  # infinite, or not a number
        raise RuntimeError("value cannot be converted to type int64_t without overflow") from None


_default_dtype = torch.get_default_dtype
# Dtypes whose values a shader computes with more bits than they have.
NARROW = (torch.float16, torch.bfloat16, torch.int16, torch.int8, torch.uint8)


def _floating(operands: Sequence[Any]) -> bool:
    """Whether any operand is a float or complex tensor, so that the default dtype decides nothing."""
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in operands)


def number(value: float) -> str:
    """A float32 of a shader's text; WGSL cannot write infinities and NaN as such."""
    value = clip(value)
    if value != value:
        return "quiet_nan()"
    if value in (float("inf"), float("-inf")):
        return "infinity()" if value > 0 else "(-infinity())"
    return f"f32({value!r})"


def clip(value: float) -> float:
    """A Python float as the nearest float32; beyond its range it is infinite, which struct refuses to do."""
    if isinstance(value, complex):
        if value.imag:
            raise RuntimeError("value cannot be converted to type float without overflow")
        value = value.real
    value = float(value)
    if value > 3.4028235677973366e38:
        return float("inf")
    if value < -3.4028235677973366e38:
        return float("-inf")
    return value


ROUNDED = {torch.float16: "rounded_to_half({})", torch.bfloat16: "rounded_to_bfloat16({})"}


def _fill(expression: str, operands: Sequence[Any], compute: str, result: str, common: torch.dtype, rule: Rule) -> str:
    """The expression with its operands put in, converted to the type it computes in, and its value to the result's.

    A tensor of another dtype is rounded to the operands' `common` one first, and so are numbers where the rule says so."""
    values = []
    tensors, scalars = itertools.count(), itertools.count()
    for i, value in enumerate(operands):
        if is_ours(value):
            converted = f"({convert(f'x{next(tensors)}', name_of(value.dtype), compute)})"
            single = value.numel() == 1 or not any(value.stride())  # parts of a large result see it expanded
            exact = value.dtype is common or (rule.scales and i == 1 and single)
            values.append(converted if exact else ROUNDED.get(common, "{}").format(converted))
        else:
            scalar = f"s{next(scalars)}()"
            if rule.rounded:
                scalar = ROUNDED.get(common, "{}").format(scalar)
            wraps = compute in ("uint8", "int8", "int16")  # numbers wrap round as elements do
            values.append(convert(scalar, "int32", compute) if wraps else scalar)
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
