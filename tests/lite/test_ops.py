"""Every op's result and gradient is torch's: over shapes, types, strides, broadcasting and zero sizes."""

# ruff: noqa: B023  (the functions made in loops are called there and then)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytorch import lite
from anytorch.lite import functional as F

EXAMPLES = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Check = Callable[..., None]

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
floats = st.sampled_from(["float32", "float64"])


def numbers(shape: tuple[int, ...], dtype: str, salt: int = 0, positive: bool = False) -> Any:
    values = np.random.default_rng(sum(shape) * 7 + len(shape) + 100 * salt).standard_normal(shape)
    return np.asarray(np.abs(values) + 0.1 if positive else values, dtype)


@st.composite
def strided(draw: Any, shape: tuple[int, ...], dtype: str, salt: int = 0, positive: bool = False) -> Any:
    """The same numbers in different memory: whole, every second one, transposed, backwards."""
    kind = draw(st.sampled_from(["whole", "stepped", "transposed", "backwards"]))
    if kind == "stepped" and shape:
        return numbers((*shape[:-1], 2 * shape[-1]), dtype, salt, positive)[..., ::2]
    if kind == "transposed" and len(shape) > 1:
        return numbers(shape[::-1], dtype, salt, positive).T
    if kind == "backwards" and shape:
        return numbers(shape, dtype, salt, positive)[::-1]
    return numbers(shape, dtype, salt, positive)


@st.composite
def broadcastable(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(shapes)
    other = [1 if draw(st.booleans()) else n for n in shape][draw(st.integers(0, len(shape))) :]
    pair = (shape, tuple(other))
    return pair if draw(st.booleans()) else pair[::-1]


UNARY = {
    "neg": (lambda x: -x, lambda x: -x, False),
    "abs": (abs, abs, False),
    "exp": (lambda x: x.exp(), torch.exp, False),
    "log": (lambda x: x.log(), torch.log, True),
    "sqrt": (lambda x: x.sqrt(), torch.sqrt, True),
    "sin": (lambda x: x.sin(), torch.sin, False),
    "cos": (lambda x: x.cos(), torch.cos, False),
    "tanh": (F.tanh, torch.tanh, False),
    "sigmoid": (F.sigmoid, torch.sigmoid, False),
    "relu": (F.relu, torch.relu, False),
    "silu": (F.silu, torch.nn.functional.silu, False),
    "gelu": (F.gelu, torch.nn.functional.gelu, False),
    "softplus": (F.softplus, torch.nn.functional.softplus, False),
    "clamp": (lambda x: x.clamp(-0.5, 0.7), lambda x: x.clamp(-0.5, 0.7), False),
    "square": (lambda x: x**2, lambda x: x**2, False),
    "cube root": (lambda x: x ** (1 / 3), lambda x: x ** (1 / 3), True),
    "two to the x": (lambda x: 2.0**x, lambda x: 2.0**x, False),
    "reciprocal": (lambda x: 1 / x, lambda x: 1 / x, True),
    "minus": (lambda x: 3 - x, lambda x: 3 - x, False),
    "double": (lambda x: x.to("float64"), lambda x: x.to(torch.float64), False),
}


@pytest.mark.parametrize("name", UNARY)
@given(data=st.data(), shape=shapes, dtype=floats)
@EXAMPLES
def test_unary(against_torch: Check, name: str, data: Any, shape: tuple[int, ...], dtype: str) -> None:
    ours, theirs, positive = UNARY[name]
    against_torch(ours, theirs, data.draw(strided(shape, dtype, positive=positive)), dtype=dtype)


BINARY = {
    "add": (lambda a, b: a + b, False),
    "sub": (lambda a, b: a - b, False),
    "mul": (lambda a, b: a * b, False),
    "div": (lambda a, b: a / b, True),
    "pow": (lambda a, b: a**b, True),
}


@pytest.mark.parametrize("name", [*BINARY, "maximum", "minimum"])
@given(data=st.data(), pair=broadcastable(), dtype=floats)
@EXAMPLES
def test_binary(against_torch: Check, name: str, data: Any, pair: Any, dtype: str) -> None:
    op, positive = BINARY.get(name, (None, False))
    a = data.draw(strided(pair[0], dtype, 1, positive))
    b = data.draw(strided(pair[1], dtype, 2, positive))
    ours, theirs = (op, op) if op else (getattr(F, name), getattr(torch, name))
    against_torch(ours, theirs, a, b, dtype=dtype)


TYPES = ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"]


@pytest.mark.parametrize("a", TYPES)
@pytest.mark.parametrize("b", TYPES)
def test_types_of_results(against_torch: Check, a: str, b: str) -> None:
    """Also with a tensor that has no dimensions, and with plain numbers."""
    x, y = np.array([1, 0, 3]).astype(a), np.array([2, 1, 1]).astype(b)
    for op in (lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x / y):
        for right in (y, y[1]):
            against_torch(op, op, x, np.asarray(right), grad=False, dtype="float16")
    for number in (True, 2, 2.5):
        against_torch(lambda x: x * number, lambda x: x * number, x, grad=False, dtype="float16")
        against_torch(lambda x: number + x, lambda x: number + x, np.asarray(x[0]), grad=False, dtype="float16")


@st.composite
def with_dims(draw: Any) -> tuple[tuple[int, ...], Any]:
    shape = draw(shapes)
    if not shape:
        return shape, None
    dims = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    return shape, dims


REDUCTIONS = {
    "sum": (lambda d, k: lambda x: x.sum(d, k), lambda d, k: lambda x: x.sum(d, k)),
    "mean": (lambda d, k: lambda x: x.mean(d, k), lambda d, k: lambda x: x.mean(d, k)),
    "var": (lambda d, k: lambda x: x.var(d, k), lambda d, k: lambda x: x.var(d, keepdim=k)),
    "amax": (lambda d, k: lambda x: x.amax(d, k), lambda d, k: lambda x: x.amax(() if d is None else d, k)),
    "amin": (lambda d, k: lambda x: x.amin(d, k), lambda d, k: lambda x: x.amin(() if d is None else d, k)),
}


@pytest.mark.filterwarnings("ignore:var\\(\\):UserWarning")  # torch's, about fewer than two numbers
@pytest.mark.parametrize("name", REDUCTIONS)
@given(data=st.data(), shape_dim=with_dims(), dtype=floats, keepdim=st.booleans())
@EXAMPLES
def test_reduction(against_torch: Check, name: str, data: Any, shape_dim: Any, dtype: str, keepdim: bool) -> None:
    shape, dim = shape_dim
    if name in ("amax", "amin") and 0 in (shape if dim is None else (shape[dim],)):
        return  # refused by both; see test_errors
    keepdim = keepdim and dim is not None
    ours, theirs = REDUCTIONS[name]
    against_torch(ours(dim, keepdim), theirs(dim, keepdim), data.draw(strided(shape, dtype)), dtype=dtype)


@given(shape_dim=with_dims(), keepdim=st.booleans())
@EXAMPLES
def test_max_along_a_dimension(against_torch: Check, shape_dim: Any, keepdim: bool) -> None:
    shape, dim = shape_dim
    if dim is None or 0 in shape:
        return
    x = np.round(numbers(shape, "float32"))  # with ties
    for part in (0, 1):
        against_torch(lambda t: t.max(dim, keepdim)[part], lambda t: t.max(dim, keepdim)[part], x, grad=part == 0)
        against_torch(lambda t: t.min(dim, keepdim)[part], lambda t: t.min(dim, keepdim)[part], x, grad=part == 0)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cumsum"])
@given(data=st.data(), shape_dim=with_dims(), dtype=floats)
@EXAMPLES
def test_along_rows(against_torch: Check, name: str, data: Any, shape_dim: Any, dtype: str) -> None:
    shape, dim = shape_dim
    if dim is None:
        return
    op = lambda x: getattr(x, name)(dim)  # noqa: E731
    against_torch(op, op, data.draw(strided(shape, dtype)), dtype=dtype)


@pytest.mark.parametrize("name", ["sum", "argmax", "any", "all"])
def test_reduction_of_whole_numbers(against_torch: Check, name: str) -> None:
    for x in (np.arange(6).reshape(2, 3), np.array([True, False, True]), np.array([3, 9, 9], "int32")):
        if name == "argmax" and x.dtype == bool:
            continue
        op = lambda t: getattr(t, name)()  # noqa: E731
        against_torch(op, op, x, grad=False)


MATRICES = [
    ((3,), (3,)), ((3,), (3, 2)), ((2, 3), (3,)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)), ((1, 5, 2, 3), (4, 1, 3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((3,), (5, 3, 2)),
    ((5, 2, 3), (3,)), ((4, 0, 3), (3, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), MATRICES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matmul(against_torch: Check, a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> None:
    op = lambda x, y: x @ y  # noqa: E731
    against_torch(op, op, numbers(a, dtype), numbers(b, dtype, 1), dtype=dtype)
    against_torch(op, op, numbers(a[::-1], dtype).T, numbers((*b[:-1], 2 * b[-1]), dtype, 1)[..., ::2], dtype=dtype)


SHAPING = {
    "reshape": lambda x: x.reshape(4, 6),
    "reshape by one": lambda x: x.reshape(-1),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "flatten": lambda x: x.flatten(1),
    "expand": lambda x: x.unsqueeze(0).expand(5, -1, 3, 4),
    "one": lambda x: x[1],
    "negative": lambda x: x[-1, :, 2],
    "slices": lambda x: x[:, 1:, ::2],
    "ellipsis": lambda x: x[..., 1],
    "new axis": lambda x: x[:, None, 0],
    "index list": lambda x: x[[0, 1, 1]],
    "two index lists": lambda x: x[[0, 1, 1], [2, 0, 0]],
    "mask": lambda x: x[x > 0],
    "twice": lambda x: x[0] * x[1],
    "split": lambda x: x.split(2, dim=2)[1],
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
}


@pytest.mark.parametrize("name", SHAPING)
def test_shaping(against_torch: Check, name: str) -> None:
    op = SHAPING[name]
    against_torch(op, op, numbers((2, 3, 4), "float32"))
    against_torch(op, op, numbers((4, 3, 2), "float64").T, dtype="float64")


def test_joining(against_torch: Check) -> None:
    a, b = numbers((2, 3), "float32"), numbers((2, 3), "float32", 1)
    for dim in (0, 1, -1):
        against_torch(lambda x, y: F.cat([x, y, x], dim), lambda x, y: torch.cat([x, y, x], dim), a, b)
        against_torch(lambda x, y: F.stack([x, y], dim), lambda x, y: torch.stack([x, y], dim), a, b)
    empty = np.zeros(0, "float32")
    against_torch(lambda x, y: F.cat([y, x]), lambda x, y: torch.cat([y, x]), a, empty, grad=False)
    against_torch(lambda x, y: F.cat([x, y]), lambda x, y: torch.cat([x, y]), a, b.astype("float64"), dtype="float32")


def test_where(against_torch: Check) -> None:
    a, b = numbers((2, 3), "float32"), numbers((3,), "float32", 1)
    mask = a > 0
    against_torch(
        lambda x, y: F.where(lite.tensor(mask), x, y), lambda x, y: torch.where(torch.from_numpy(mask), x, y), a, b
    )
    against_torch(
        lambda x: x.masked_fill(lite.tensor(mask), 5.0), lambda x: x.masked_fill(torch.from_numpy(mask), 5.0), a
    )


def test_comparisons(against_torch: Check) -> None:
    a, b = np.array([1.0, 2.0, np.nan]), np.array([1.0, 3.0, np.nan])
    for op in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
        against_torch(lambda x, y: getattr(x, op)(y), lambda x, y: getattr(x, op)(y), a, b, grad=False)
        against_torch(lambda x: getattr(x, op)(2), lambda x: getattr(x, op)(2), a, grad=False)


def test_corners(against_torch: Check) -> None:
    """Infinities, zeros and ties: the answers torch gives, without a warning."""
    x = np.array([-np.inf, -100, -1, 0, 1, 100, np.inf, np.nan], "float32")
    torch_functions = torch.nn.functional
    for ours, theirs in (
        (F.relu, torch.relu), (F.sigmoid, torch.sigmoid), (F.tanh, torch.tanh), (lambda t: t.exp(), torch.exp),
        (lambda t: t.log(), torch.log), (lambda t: t.sqrt(), torch.sqrt), (lambda t: 1 / t, lambda t: 1 / t),
    ):  # fmt: skip
        against_torch(ours, theirs, x, grad=False)
    finite = np.array([-30, -1, 0, 0, 1, 30], "float64")
    for name in ("relu", "gelu", "silu"):
        against_torch(getattr(F, name), getattr(torch_functions, name), finite, dtype="float64")
    zeros = np.zeros(3)
    against_torch(lambda a: a**0, lambda a: a**0, zeros)
    against_torch(lambda a: a**2, lambda a: a**2, zeros)
    against_torch(abs, abs, zeros)
    against_torch(F.maximum, torch.maximum, zeros, zeros)
    against_torch(lambda a: a.max(), lambda a: a.max(), np.array([1.0, 2.0, 2.0]))


def numeric_gradient(function: Callable[[Any], float], x: Any, step: float = 1e-6) -> Any:
    out = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out


@pytest.mark.parametrize("name", UNARY)
def test_unary_against_differences(name: str) -> None:
    op, _, positive = UNARY[name]
    x = numbers((2, 3), "float64", positive=positive)
    t = lite.tensor(x, requires_grad=True)
    op(t).sum().backward()
    expected = numeric_gradient(lambda v: op(lite.tensor(v)).sum().item(), x)
    np.testing.assert_allclose(t.grad.numpy(), expected, rtol=1e-5, atol=1e-7)
