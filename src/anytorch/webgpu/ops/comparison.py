"""Comparisons, logic, bits, selection and clamping."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import RULES, op_of, pointwise_kernel, refused_beyond, register_forms, register_pointwise
from anytorch.webgpu.launch import overlap
from anytorch.webgpu.pointwise import Rule, number
from anytorch.webgpu.tensors import KEY, aten

# A comparison that holds for equal values is not left to the compiler: `x <= x` may be folded to true, and x may be a NaN.
COMPARISONS = {
    "eq": "equal_{T}({0}, {1})",
    "ne": "!equal_{T}({0}, {1})",
    "lt": "{0} < {1}",
    "le": "at_most_{T}({0}, {1})",
    "gt": "{0} > {1}",
    "ge": "at_most_{T}({1}, {0})",
}

LOGIC = {
    "logical_not": Rule("{bool}!is_true_{T}({0})", compute="input"),
    "logical_and": Rule("{bool}is_true_{T}({0}) && is_true_{T}({1})"),
    "logical_or": Rule("{bool}is_true_{T}({0}) || is_true_{T}({1})"),
    "logical_xor": Rule("{bool}is_true_{T}({0}) != is_true_{T}({1})"),
    "bitwise_and.Tensor": Rule("bits_and_{T}({0}, {1})"),
    "bitwise_or.Tensor": Rule("bits_or_{T}({0}, {1})"),
    "bitwise_xor.Tensor": Rule("bits_xor_{T}({0}, {1})"),
    "bitwise_left_shift.Tensor": Rule("shift_left_{T}({0}, {1})"),
    "bitwise_right_shift.Tensor": Rule("shift_right_{T}({0}, {1})"),
    "__lshift__.Tensor": Rule("shift_left_{T}({0}, {1})"),
    "__rshift__.Tensor": Rule("shift_right_{T}({0}, {1})"),
    "__lshift__.Scalar": Rule("shift_left_{T}({0}, {1})"),
    "__rshift__.Scalar": Rule("shift_right_{T}({0}, {1})"),
    "heaviside": Rule("select(select({T}(0), {T}(1), {0} > {T}(0)), {1}, {0} == {T}(0))"),
}

SHIFTS = {  # their in-place forms have names of their own
    "__ilshift__.Tensor": LOGIC["__lshift__.Tensor"],
    "__ilshift__.Scalar": LOGIC["__lshift__.Scalar"],
    "__irshift__.Tensor": LOGIC["__rshift__.Tensor"],
    "__irshift__.Scalar": LOGIC["__rshift__.Scalar"],
}

LOWER = Rule("maximum_{T}({0}, {1})")
UPPER = Rule("minimum_{T}({0}, {1})")
BOTH = Rule("minimum_{T}(maximum_{T}({0}, {1}), {2})")

SELECTION = {
    **dict.fromkeys(("clamp_min", "clamp_min.Tensor"), LOWER),
    **dict.fromkeys(("clamp_max", "clamp_max.Tensor"), UPPER),
    "where.self": Rule("select({2}, {1}, {0} != {T}(0))", compute="output"),
    "threshold": Rule("select({0}, {2}, at_most_{T}({0}, {1}))", compute="output", constant=True),
}

# Tests of a float's bits. Of an integer's value they are known without looking.
BITS = {
    "isnan": "is_nan({0})",
    "isinf": "is_inf({0})",
    "isposinf": "is_inf({0}) && {0} > 0.0",
    "isneginf": "is_inf({0}) && {0} < 0.0",
    "signbit": "(bitcast<u32>({0}) >> 31u) == 1u",
}


MASKED_FILL = Rule("select({0}, {2}, {1} != {T}(0))", compute="input")


EXPANDED = (  # torch's own words
    "Use of masked_fill_ on expanded tensors is deprecated. Please clone() the tensor before performing this operation. "
    "This also applies to advanced indexing e.g. tensor[mask] = scalar"
)


def _masked_fill(op: Any) -> Callable[..., Any]:
    """In place, an expanded tensor may be filled, as on the CPU: a value written twice to one place is the same value."""
    unchecked = pointwise_kernel(op, MASKED_FILL)

    def kernel(self: torch.Tensor, mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if mask.dtype is not torch.bool:
            raise RuntimeError(f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype}")
        return unchecked(self, mask, *args, **kwargs)

    if op._opname != "masked_fill_":
        return kernel

    def masked_fill(self: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and overlap(self, value):  # torch takes the value before it writes
            value = value.clone()
        shared = [d for d, step in enumerate(self.stride()) if not step and self.size(d) > 1]
        if not shared or not self.numel():
            return kernel(self, mask, value)  # type: ignore[no-any-return]
        warnings.warn(EXPANDED, stacklevel=2)
        anywhere, places = mask.expand(self.shape).any(shared, keepdim=True), self
        for d in shared:
            places = places.narrow(d, 0, 1)
        kernel(places, anywhere, value)
        return self

    return masked_fill


def _bits(op: Any, expression: str, integers: str) -> Callable[..., Any]:
    floats = pointwise_kernel(op, Rule("{bool}" + expression, compute="input"))
    others = pointwise_kernel(op, Rule("{bool}" + integers, compute="input"))

    def test(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (floats if tensor.is_floating_point() else others)(tensor, *args, **kwargs)

    return test


def _not(op: Any) -> Callable[..., Any]:
    bits = pointwise_kernel(op, Rule("bits_not_{T}({0})"))
    truth = pointwise_kernel(op, Rule("1 - {0}"))

    def invert(tensor: torch.Tensor, **kwargs: Any) -> Any:
        return (truth if tensor.dtype is torch.bool else bits)(tensor, **kwargs)

    return invert


def _clamp(op: Any) -> Callable[..., Any]:
    """Either bound may be absent; then the other op's kernel is the whole of it."""
    base, overload = op._schema.name.split("::")[1], op._overloadname
    tensors = "Tensor" in overload
    trailing = "_" if base.endswith("_") else ""
    other = "Tensor_out" if tensors else "out"
    chosen = other if overload.endswith("out") else "Tensor" if tensors else "default"
    lower = pointwise_kernel(getattr(getattr(aten, "clamp_min" + trailing), chosen), LOWER)
    upper = pointwise_kernel(getattr(getattr(aten, "clamp_max" + trailing), chosen), UPPER)
    both = pointwise_kernel(op, BOTH)

    def clamp(tensor: torch.Tensor, min: Any = None, max: Any = None, **kwargs: Any) -> Any:
        if max is None and min is None:
            raise RuntimeError("torch.clamp: At least one of 'min' or 'max' must not be None")
        refused_beyond(op, tensor, (min, max), kwargs)
        if max is None:
            return lower(tensor, min, **kwargs)
        return upper(tensor, max, **kwargs) if min is None else both(tensor, min, max, **kwargs)

    return clamp


def _nan_to_num(op: Any) -> Callable[..., Any]:
    def expression(largest: float) -> Callable[..., str]:
        def make(nan: float | None, positive: float | None, negative: float | None) -> str:
            above = number(largest if positive is None else positive)
            below = number(-largest if negative is None else negative)
            inf = f"select({below}, {above}, {{0}} > 0.0)"
            return f"select(select({{0}}, {inf}, is_inf({{0}})), {number(nan or 0.0)}, is_nan({{0}}))"

        return make

    kernels = {
        dtype: pointwise_kernel(op, Rule(expression(torch.finfo(dtype).max), compute="input"))
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    }
    unchanged = pointwise_kernel(op, Rule(lambda *_: "{0}", compute="input"))

    def replace(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.is_complex():
            return fallback(op, tensor, *args, **kwargs)
        return kernels.get(tensor.dtype, unchanged)(tensor, *args, **kwargs)

    return replace


def register(library: torch.library.Library) -> None:
    for name, expression in COMPARISONS.items():
        for overload in ("Tensor", "Scalar"):
            register_pointwise(library, op_of(f"{name}.{overload}"), Rule("{bool}" + expression, rounded=True))
    for name, rule in (*LOGIC.items(), *SELECTION.items()):
        register_pointwise(library, op_of(name), rule)
    for name, rule in SHIFTS.items():
        library.impl(op_of(name), pointwise_kernel(op_of(name), rule), KEY)
    for op in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        RULES[op] = MASKED_FILL
        register_forms(library, op, _masked_fill)
    RULES[aten.clamp.default] = RULES[aten.clamp.Tensor] = BOTH
    for name, expression in BITS.items():
        RULES[op_of(name)] = Rule("{bool}" + expression, compute="input")
        integers = "{0} < {T}(0)" if name == "signbit" else "{0} != {0}"
        register_forms(library, op_of(name), partial(_bits, expression=expression, integers=integers))
    for op, make in (
        (aten.bitwise_not.default, _not),
        (aten.clamp.default, _clamp),
        (aten.clamp.Tensor, _clamp),
        (aten.nan_to_num.default, _nan_to_num),
    ):
        register_forms(library, op, make)
