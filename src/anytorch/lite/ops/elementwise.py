"""Ops that work number by number. `g` is the gradient of the result; `fit` undoes broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.autograd import Base, array, fit, make, record
from anytorch.lite.dtypes import Array, Scalar, float32, is_floating, promoted, scalar_dtype
from anytorch.lite.moving import on_device, on_gpu

T = TypeVar("T", bound=Base)

# torch computes 1/0 and log(-1) without a word, and so do we where an op can meet them every day.
quiet = np.errstate(all="ignore")


def like(x: Array, value: Scalar) -> Any:
    """`value` beside `x`: as it is, or as an array of the type the result must have."""
    dtype = scalar_dtype(value, x.dtype)
    return value if dtype == x.dtype and x.ndim else np.asarray(value, dtype)


def cast(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else x.astype(dtype)


def binary(
    name: str,
    a: T | Scalar,
    b: T | Scalar,
    compute: Callable[[Any, Any], Any],
    of_a: Callable[[Array, Any, Any], Any],
    of_b: Callable[[Array, Any, Any], Any],
    saves: bool = True,
    floating: bool = False,
) -> T:
    """An op on two tensors, or on a tensor and a number; `of_a(g, x, y)` and `of_b(g, x, y)` are the two gradients."""
    if isinstance(a, Base) and isinstance(b, Base):
        x, y = a.data, b.data
        a_shape, a_dtype, b_shape, b_dtype = x.shape, x.dtype, y.shape, y.dtype
        if a_dtype != b_dtype or (floating and not is_floating(a_dtype)):
            dtype = promoted(x, y)
            dtype = dtype if is_floating(dtype) or not floating else float32
            # Whole numbers rest on the host; made floats, they belong on the device.
            x, y = on_device(cast(x, dtype), a.device), on_device(cast(y, dtype), b.device)

        def both(g: Array) -> tuple[Array | None, Array | None]:
            return (
                fit(array(of_a(g, x, y)), a_shape, a_dtype) if a.requires_grad else None,
                fit(array(of_b(g, x, y)), b_shape, b_dtype) if b.requires_grad else None,
            )

        return record(name, compute(x, y), (a, b), both, (a, b) if saves else ())
    first = isinstance(a, Base)
    tensor, number = (a, b) if isinstance(a, Base) else (b, a)
    if not isinstance(tensor, Base) or not isinstance(number, (bool, int, float, np.number)):
        raise UsageError(f"{name}: {type(number).__name__} is neither a tensor nor a number")
    number = number.item() if isinstance(number, np.generic) else number
    dtype = scalar_dtype(number, tensor.data.dtype)
    dtype = dtype if is_floating(dtype) or not floating else float32
    x = cast(tensor.data, dtype)
    y = like(x, number)
    result, of = (compute(x, y), of_a) if first else (compute(y, x), of_b)

    def one(g: Array) -> tuple[Array]:
        return (cast(array(of(g, x, y) if first else of(g, y, x)), tensor.data.dtype),)

    return record(name, result, (tensor,), one, (tensor,) if saves else ())


def add(a: T | Scalar, b: T | Scalar) -> T:
    return binary("add", a, b, np.add, lambda g, x, y: g, lambda g, x, y: g, saves=False)


def sub(a: T | Scalar, b: T | Scalar) -> T:
    return binary("sub", a, b, np.subtract, lambda g, x, y: g, lambda g, x, y: -g, saves=False)


def mul(a: T | Scalar, b: T | Scalar) -> T:
    return binary("mul", a, b, np.multiply, lambda g, x, y: g * y, lambda g, x, y: g * x)


@quiet
def div_base(g: Array, x: Any, y: Any) -> Any:
    return g / y


@quiet
def div_divisor(g: Array, x: Any, y: Any) -> Any:
    return -g * x / (y * y)


@quiet
def div(a: T | Scalar, b: T | Scalar) -> T:
    return binary("div", a, b, np.true_divide, div_base, div_divisor, floating=True)


@quiet
def power_base(g: Array, x: Any, y: Any) -> Any:
    if np.ndim(y) == 0 and y != 0:
        return g * (y * np.power(x, array(np.subtract(y, 1))))
    return g * np.where(y == 0, array(np.zeros_like(x)), y * np.power(x, array(np.subtract(y, 1))))


@quiet
def power_exponent(g: Array, x: Any, y: Any) -> Any:
    result = np.power(x, y)
    return g * np.where((x == 0) & (y >= 0), array(np.zeros_like(result)), result * np.log(x))


@quiet
def power(a: T | Scalar, b: T | Scalar) -> T:
    return binary("pow", a, b, np.power, power_base, power_exponent)


def maximum(a: T | Scalar, b: T | Scalar) -> T:
    """Where both are equal, each gets half of the gradient."""
    return binary("maximum", a, b, np.maximum, winner, lambda g, x, y: winner(g, y, x))


def minimum(a: T | Scalar, b: T | Scalar) -> T:
    return binary("minimum", a, b, np.minimum, lambda g, x, y: winner(g, y, x), winner)


def winner(g: Array, x: Any, y: Any) -> Array:
    """The share of x in the gradient of the larger of x and y."""
    return g * ((x > y) + 0.5 * (x == y)).astype(g.dtype)


def compare(a: T, b: T | Scalar, compute: Callable[[Any, Any], Any]) -> T:
    """A tensor of booleans; no gradient."""
    out: T = make(a, compute(a.data, b.data if isinstance(b, Base) else b))
    return out


def where(condition: Base, a: T | Scalar, b: T | Scalar) -> T:
    """`a` where the condition holds, else `b`."""
    mask = condition.data
    return binary(
        "where",
        a,
        b,
        lambda x, y: np.where(mask, x, y),
        lambda g, x, y: np.where(mask, g, array(np.zeros_like(g))),
        lambda g, x, y: np.where(mask, array(np.zeros_like(g)), g),
        saves=False,
    )


# --- of one tensor ---------------------------------------------------------------------------------------------------


def unary(name: str, x: T, result: Array, derivative: Callable[[], Any], of_output: bool = False) -> T:
    """`derivative()` is computed only if backward comes by. Ops whose derivative is read off the result save that."""

    def backward(g: Array) -> tuple[Array]:
        with np.errstate(all="ignore"):
            return (array(g * derivative()),)

    return record(name, result, (x,), backward, () if of_output else (x,), of_output)


def floats(x: Base) -> Array:
    """The numbers as floats: exp of an integer tensor is float32."""
    return x.data if is_floating(x.data.dtype) else x.data.astype(float32)


def neg(x: T) -> T:
    return record("neg", -x.data, (x,), lambda g: (-g,))


def absolute(x: T) -> T:
    return unary("abs", x, np.abs(x.data), lambda: np.sign(x.data))


@quiet
def exp(x: T) -> T:
    y = np.exp(floats(x))
    return unary("exp", x, y, lambda: y, of_output=True)


@quiet
def log(x: T) -> T:
    return unary("log", x, np.log(floats(x)), lambda: 1 / x.data)


@quiet
def sqrt(x: T) -> T:
    y = np.sqrt(floats(x))
    return unary("sqrt", x, y, lambda: 0.5 / y, of_output=True)


def sin(x: T) -> T:
    return unary("sin", x, np.sin(floats(x)), lambda: np.cos(x.data))


def cos(x: T) -> T:
    return unary("cos", x, np.cos(floats(x)), lambda: -np.sin(x.data))


def tanh(x: T) -> T:
    y = np.tanh(floats(x))
    return unary("tanh", x, y, lambda: 1 - y * y, of_output=True)


def logistic(x: Array) -> Array:
    """1 / (1 + e⁻ˣ), written with tanh, which cannot overflow."""
    return 0.5 * np.tanh(0.5 * x) + 0.5


def sigmoid(x: T) -> T:
    y = array(logistic(floats(x)))
    return unary("sigmoid", x, y, lambda: y * (1 - y), of_output=True)


def relu(x: T) -> T:
    y = np.maximum(x.data, 0)
    return unary("relu", x, y, lambda: np.sign(y), of_output=True)  # y is never negative: 0 or 1


def silu(x: T) -> T:
    """x · sigmoid(x)"""
    s = array(logistic(floats(x)))
    return unary("silu", x, x.data * s, lambda: s * (1 + x.data * (1 - s)))


# The error function, which NumPy does not have, as a table.
STEP = 1 / 256
LAST = 6.0  # erf(6) is 1 in double precision
_at = np.arange(0, LAST + 2 * STEP, STEP)
_value = np.array([math.erf(t) for t in _at])
_slope = 2 / math.sqrt(math.pi) * np.exp(-_at * _at) * STEP


def erf(x: Array) -> Array:
    """erf by cubic Hermite interpolation in a table of its values and slopes; the error is below 1e-11."""
    place = np.minimum(np.abs(x), LAST).astype(np.float64) / STEP  # in steps of the table
    index = place.astype(np.intp)
    index = np.where(np.isnan(x), 0, index) if np.isnan(x).any() else index
    t = place - index  # 0 ≤ t < 1
    left, right = _value[index], _value[index + 1]
    slope_left, slope_right = _slope[index], _slope[index + 1]
    rise = right - left
    a, b = slope_left - rise, rise - slope_right
    y = left + t * (rise + (1 - t) * (a * (1 - t) + b * t))
    return np.copysign(y, x).astype(x.dtype)


@on_gpu
def gelu_of(x: Array) -> tuple[Array, Callable[[], Array]]:
    """x · Φ(x), and its derivative, to be called if it is wanted."""
    phi = 0.5 * (1 + erf(x * 0.5**0.5))
    return x * phi, lambda: phi + x * np.exp(-0.5 * x * x) * (2 * np.pi) ** -0.5


def gelu(x: T) -> T:
    """x · Φ(x), with the exact normal distribution function (torch's default)."""
    y, derivative = gelu_of(floats(x))
    return unary("gelu", x, y, derivative)


def softplus(x: T) -> T:
    """log(1 + eˣ)"""
    return unary("softplus", x, np.logaddexp(x.data, like(x.data, 0)), lambda: logistic(x.data))


def clamp(x: T, low: float | None = None, high: float | None = None) -> T:
    if low is None and high is None:
        raise UsageError("clamp: neither min nor max was given")
    result = np.clip(x.data, low, high)
    return unary("clamp", x, result, lambda: x.data == result)


def cast_to(x: T, dtype: Any) -> T:
    before = x.data.dtype
    return record("cast", x.data.astype(dtype), (x,), lambda g: (g.astype(before),))
