"""Unary and binary arithmetic, rounding, powers and elementary functions, as a table: op to expression."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import RULES, op_of, pointwise_kernel, refused_beyond, register_forms, register_pointwise
from anytorch.webgpu.pointwise import ROUNDED, Compute, Rule
from anytorch.webgpu.tensors import KEY, aten


def _float(expression: str | Callable[..., str]) -> Rule:
    return Rule(expression, compute="float")


# One function of `gpu.wgsl.functions` each; integers are computed as floats.
ELEMENTARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv", "lgamma", "digamma", "sinc",
)  # fmt: skip

UNARY = {
    "neg": Rule("-{0}"),
    "abs": Rule("abs({0})"),
    "sign": Rule("sign_{T}({0})"),
    "sgn": Rule("sign_{T}({0})"),
    "sqrt": _float("sqrt({0})"),
    "rsqrt": _float("divide_{T}({T}(1), sqrt({0}))"),
    "reciprocal": _float("divide_{T}({T}(1), {0})"),
    "floor": Rule("floor_{T}({0})"),
    "ceil": Rule("ceil_{T}({0})"),
    "trunc": Rule("trunc_{T}({0})"),
    "round": Rule("round_{T}({0})"),
    "frac": Rule("{0} - trunc_{T}({0})"),
    "deg2rad": _float("{0} * {T}(0.017453292519943295)"),
    "rad2deg": _float("{0} * {T}(57.29577951308232)"),
    "special_entr": _float("entropy_{T}({0})"),
    **{name: _float(f"{name}_{{T}}({{0}})") for name in ELEMENTARY},
}

BINARY = {
    "add.Tensor": Rule("{0} + {1} * {2}", short="{0} + {1}"),
    "sub.Tensor": Rule("{0} - {1} * {2}", short="{0} - {1}"),
    "rsub.Tensor": Rule("{1} - {0} * {2}", short="{1} - {0}"),
    "mul.Tensor": Rule("{0} * {1}", scales=True),
    "div.Tensor": Rule("divide_{T}({0}, {1})", compute="float", scales=True),
    "floor_divide": Rule("floor_divide_{T}({0}, {1})", scales=True),
    "fmod.Tensor": Rule("fmod_{T}({0}, {1})", rounded=True),
    "remainder.Tensor": Rule("remainder_{T}({0}, {1})", rounded=True),
    "remainder.Scalar_Tensor": Rule("remainder_{T}({0}, {1})", rounded=True),
    "maximum": Rule("maximum_{T}({0}, {1})"),
    "minimum": Rule("minimum_{T}({0}, {1})"),
    "fmax": Rule("fmax_{T}({0}, {1})"),
    "fmin": Rule("fmin_{T}({0}, {1})"),
    "atan2": _float("atan2_{T}({0}, {1})"),
    "hypot": _float("hypot_{T}({0}, {1})"),
    "copysign.Tensor": _float("copysign_{T}({0}, {1})"),
    "xlogy.Tensor": Rule("xlogy_{T}({0}, {1})", compute="float", rounded=True),
    "special_xlog1py": Rule("xlog1py_{T}({0}, {1})", compute="float", rounded=True),
    "logaddexp": _float("logaddexp_{T}({0}, {1})"),
    "logaddexp2": _float("logaddexp2_{T}({0}, {1})"),
    "gcd": Rule("gcd_{T}({0}, {1})"),
    "lcm": Rule("lcm_{T}({0}, {1})"),
    "pow.Tensor_Tensor": Rule("pow_{T}({0}, {1})", rounded=True),
    "pow.Scalar": Rule("pow_{T}({0}, {1})", rounded=True),
}

# The end nearer to the weight is the one that is met exactly, as in torch.
_LERP = Rule(
    "select({1} - ({1} - {0}) * ({T}(1) - {2}), {0} + {2} * ({1} - {0}), abs({2}) < {T}(0.5))", compute="output"
)
TERNARY = {
    "addcmul": Rule("{0} + {3} * {1} * {2}", short="{0} + {1} * {2}"),
    "addcdiv": Rule("{0} + {3} * divide_{T}({1}, {2})", short="{0} + divide_{T}({1}, {2})"),
    "lerp.Scalar": _LERP,
    "lerp.Tensor": _LERP,
}

DIVISIONS = {
    None: BINARY["div.Tensor"],
    "trunc": Rule("trunc_divide_{T}({0}, {1})", scales=True),
    "floor": BINARY["floor_divide"],
}

# Exponents that need no logarithm; a float result only, integers have their own exact power.
POWERS: dict[float, tuple[str, Compute]] = {
    0.5: ("sqrt({0})", "promote"),
    1.0: ("{0}", "promote"),
    2.0: ("{0} * {0}", "promote"),
    3.0: ("{0} * {0} * {0}", "promote"),
    -0.5: ("divide_{T}({T}(1), sqrt({0}))", "float"),
    -1.0: ("divide_{T}({T}(1), {0})", "float"),
    -2.0: ("divide_{T}({T}(1), {0} * {0})", "float"),
}


# In a half type torch rounds the quotient to the type before it cuts off the fraction.
NARROW_TRUNC = {dtype: Rule(f"trunc({rounding.format('divide_{T}({0}, {1})')})") for dtype, rounding in ROUNDED.items()}


def _division(op: Any) -> Callable[..., Any]:
    kernels = {mode: pointwise_kernel(op, rule) for mode, rule in DIVISIONS.items()}
    narrow = {dtype: pointwise_kernel(op, rule) for dtype, rule in NARROW_TRUNC.items()}

    def divide(*args: Any, rounding_mode: str | None = None, **kwargs: Any) -> Any:
        if rounding_mode not in kernels:
            raise RuntimeError(
                f"div expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{rounding_mode}'"
            )
        chosen = kernels[rounding_mode]
        if rounding_mode == "trunc":
            dtypes = {v.dtype for v in args if isinstance(v, torch.Tensor)}
            if len(dtypes) == 1 and isinstance(args[1], torch.Tensor):  # not where it divides by a number
                chosen = narrow.get(dtypes.pop(), chosen)
        return chosen(*args, rounding_mode=rounding_mode, **kwargs)

    return divide


POWER = Rule("pow_{T}({0}, {1})", rounded=True)


def _power(op: Any) -> Callable[..., Any]:
    general = pointwise_kernel(op, POWER)
    special = {value: pointwise_kernel(op, Rule(text, compute)) for value, (text, compute) in POWERS.items()}
    integer_exponents = {1.0, 2.0, 3.0}

    def power(base: torch.Tensor, exponent: Any, **kwargs: Any) -> Any:
        if isinstance(exponent, int) and exponent < 0 and not (base.is_floating_point() or base.is_complex()):
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        if base.is_floating_point():
            refused_beyond(op, base, (exponent,), kwargs)
        if isinstance(exponent, (int, float)) and (base.is_floating_point() or exponent in integer_exponents):
            return special.get(exponent, general)(base, exponent, **kwargs)
        return general(base, exponent, **kwargs)

    return power


def _round_decimals(op: Any) -> Callable[..., Any]:
    def expression(decimals: int) -> str:
        scale = f"{{T}}({10.0 ** abs(decimals)!r})"
        if decimals >= 0:
            return f"round_{{T}}({{0}} * {scale}) / {scale}"
        return f"round_{{T}}({{0}} / {scale}) * {scale}"

    return pointwise_kernel(op, Rule(expression))


def _polygamma(op: Any) -> Callable[..., Any]:
    """The first two derivatives of log gamma have kernels; they are the gradients of lgamma and digamma."""
    kernels = {
        0: pointwise_kernel(op, _float(lambda n: "digamma_{T}({0})")),
        1: pointwise_kernel(op, _float(lambda n: "trigamma_{T}({0})")),
    }

    def polygamma(n: int, self: torch.Tensor, **kwargs: Any) -> Any:
        return kernels.get(n, partial(fallback, op))(n, self, **kwargs)

    return polygamma


def _next_after(op: Any) -> Callable[..., Any]:
    single = pointwise_kernel(op, Rule("next_after({0}, {1})"))

    def next_after(self: torch.Tensor, other: Any, **kwargs: Any) -> Any:
        dtypes = {v.dtype for v in (self, other) if isinstance(v, torch.Tensor)}
        return (single if dtypes == {torch.float32} else partial(fallback, op))(self, other, **kwargs)

    return next_after


def register(library: torch.library.Library) -> None:
    for name, rule in (*UNARY.items(), *BINARY.items(), *TERNARY.items()):
        register_pointwise(library, op_of(name), rule)
    RULES[aten.pow.Tensor_Scalar] = POWER
    for op in (aten.polygamma.default, aten.polygamma.out):
        library.impl(op, _polygamma(op), KEY)
    for op, make in (
        (aten.div.Tensor_mode, _division),
        (aten.pow.Tensor_Scalar, _power),
        (aten.round.decimals, _round_decimals),
        (aten.nextafter.default, _next_after),
    ):
        register_forms(library, op, make)
