"""Tensors made from numbers: fills, zeros, ranges, identity and triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.forms import resized
from anytorch.webgpu.kernels import RULES, pointwise_kernel
from anytorch.webgpu.launch import META, to_meta
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import aten, buffer_of, is_ours, new_contiguous, storage_nbytes

FILL = Rule("{1}", compute="input")
ZERO = Rule("{0}", compute="output")
LARGE = 1 << 16  # from here on clearing a buffer beats a kernel: it ends the compute pass, which costs a few µs

# In these `i` is the element's place in the output.
STEPS = Rule("{0} + {1} * {T}(i)", compute="output")
# From the nearer end, so that the last element is the end itself. The number of steps is exact in a float to 2^24.
BETWEEN = Rule(
    "select({1} - {2} * {T}(u32({3}) - 1u - i), {0} + {2} * {T}(i), i < u32({3}) / 2u)",
    compute="output",
)
DIAGONAL = Rule(lambda columns: f"select({{T}}(0), {{T}}(1), i / {columns}u == i % {columns}u)", compute="output")
# Sizes are parameters, so that one shader serves every length of a causal mask; a byte cannot hold them: written into it.
_DISTANCE = "i32(i % u32({1})) - i32((i / u32({1})) % u32({2}))"
LOWER = Rule(f"select({{T}}(0), {{0}}, {_DISTANCE} <= i32({{3}}))", compute="input")
UPPER = Rule(f"select({{T}}(0), {{0}}, {_DISTANCE} >= i32({{3}}))", compute="input")


def _narrow(sign: str) -> Rule:
    def expression(columns: int, rows: int, k: int) -> str:
        return f"select({{T}}(0), {{0}}, i32(i % {columns}u) - i32((i / {columns}u) % {rows}u) {sign} {k})"

    return Rule(expression, compute="input")


NARROW_LOWER, NARROW_UPPER = _narrow("<="), _narrow(">=")
EXACT = 1 << 24
WINDOW_SLACK = 512  # what aligning the ends of a binding may add


def _in_one_binding(tensor: torch.Tensor) -> bool:
    """A larger tensor is computed in parts, and a part does not know its place."""
    nbytes = storage_nbytes(tensor.size(), tensor.stride(), tensor.dtype)
    return nbytes + WINDOW_SLACK <= open_runtime().binding_limit


def zero_(self: torch.Tensor) -> torch.Tensor:
    if self.numel() == 0:
        return self
    nbytes = self.numel() * self.dtype.itemsize
    if nbytes >= LARGE and self.is_contiguous():
        buffer, offset = buffer_of(self)
        whole = nbytes & ~3
        if offset % 4 == 0:
            open_runtime().clear(buffer, offset, whole)
            if whole != nbytes:
                rest = nbytes - whole
                zero_(self.view(-1)[-(rest // self.dtype.itemsize) :])
            return self
    if run(ZERO, aten.zero_.default, (0,), (), self) is None:
        fallback(aten.zero_.default, self)
    return self


def fill_tensor_(self: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim():
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dimensions."
        )
    return self.copy_(value.expand(self.shape)) if is_ours(value) else self.fill_(value.item())


def arange(start: Any, end: Any, step: Any = 1, *, out: torch.Tensor) -> torch.Tensor:
    numbers = (start, end, step)
    if all(type(v) is int for v in numbers) and step != 0 and (end - start) * step >= 0 and out.dtype is torch.int64:
        shape: tuple[int, ...] = (-((start - end) // step),)  # the usual case; the rest, and what is wrong, is torch's
    else:
        shape = aten.arange.start_step(start, end, step, dtype=out.dtype, device=META).shape
    resized(out, shape)
    if out.numel() and (not _in_one_binding(out) or run(STEPS, aten.arange.start_out, (start, step), (), out) is None):
        fallback(aten.arange.start_out, start, end, step, out=out)
    return out


def linspace(start: Any, end: Any, steps: int, *, out: torch.Tensor) -> torch.Tensor:
    if steps < 0:
        raise RuntimeError("number of steps must be non-negative")
    resized(out, (steps,))
    if steps == 0:
        return out
    if steps == 1:
        return out.fill_(start)
    native = out.is_floating_point() and steps < EXACT and _in_one_binding(out)
    step = (float(end) - float(start)) / (steps - 1) if native else 0.0
    if not native or run(BETWEEN, aten.linspace.out, (start, end, step, steps), (), out) is None:
        fallback(aten.linspace.out, start, end, steps, out=out)
    return out


def eye(n: int, m: int | None = None, *, out: torch.Tensor) -> torch.Tensor:
    columns = n if m is None else m
    if n < 0 or columns < 0:
        raise RuntimeError(f"n must be greater or equal to 0, got {min(n, columns)}")
    resized(out, (n, columns))
    if out.numel() and (not _in_one_binding(out) or run(DIAGONAL, aten.eye.m_out, (), (columns,), out) is None):
        fallback(aten.eye.m_out, n, columns, out=out)
    return out


def _triangle(op: Any, rule: Rule, narrow: Rule) -> Any:
    def triangle(self: torch.Tensor, diagonal: int = 0, *, out: torch.Tensor | None = None) -> Any:
        given = {} if out is None else {"out": out}
        if self.dim() < 2 or max(self.shape[-2:]) >= EXACT or not _in_one_binding(self):
            return fallback(op, self, diagonal, **given)
        if out is not None:
            resized(out, self.shape)
        rows, columns = self.shape[-2:]
        # Further out than this nothing changes any more, and the number stays small.
        numbers = (columns, rows, max(-rows, min(columns, diagonal)))
        small = self.dtype.itemsize < 4 and not self.is_floating_point()

        def shape() -> Any:
            return op(to_meta(self), diagonal) if out is None else out

        if small:
            result = run(narrow, op, (self,), numbers, out, shape)
        else:
            result = run(rule, op, (self, *numbers), (), out, shape)
        return fallback(op, self, diagonal, **given) if result is None else result

    return triangle


def efficient_zero_tensor(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    """Zeros that autograd knows to be zeros, on devices that can mark them so; here they are plain."""
    return zero_(new_contiguous(size, dtype or torch.get_default_dtype()))


def register(library: torch.library.Library) -> None:
    RULES[aten.fill.Scalar] = FILL
    for op in (aten.fill.Scalar, aten.fill_.Scalar, aten.fill.Scalar_out):
        library.impl(op, pointwise_kernel(op, FILL), "PrivateUse1")
    for name, kernel in (
        ("zero_", zero_),
        ("fill_.Tensor", fill_tensor_),
        ("arange.start_out", arange),
        ("linspace.out", linspace),
        ("eye.out", eye),
        ("eye.m_out", eye),
        ("_efficientzerotensor", efficient_zero_tensor),
    ):
        library.impl(name, kernel, "PrivateUse1")
    for name, rule, narrow in (("tril", LOWER, NARROW_LOWER), ("triu", UPPER, NARROW_UPPER)):
        packet = getattr(aten, name)
        for op in (packet.default, packet.out):
            library.impl(op, _triangle(op, rule, narrow), "PrivateUse1")
