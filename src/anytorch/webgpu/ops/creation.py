"""Tensors made from numbers: fills, zeros, ranges, identity and triangles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.gpu.runtime import open_runtime
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import register_kernels, register_pointwise, resized
from anytorch.webgpu.launch import META, NoKernel, to_meta
from anytorch.webgpu.pointwise import Rule, run
from anytorch.webgpu.tensors import KEY, aten, buffer_of, is_ours, new_contiguous, storage_nbytes

FILL = Rule("{1}", compute="input", constant=True)
ZERO = Rule("{0}", compute="output", constant=True)
LARGE = 1 << 16  # from here on clearing a buffer beats a kernel: it ends the compute pass, which costs a few µs

# In these `i` is the element's place in the output.
STEPS = Rule("{0} + {1} * {T}(i)", compute="output")
# From the nearer end, so that the last element is the end itself. The number of steps is exact in a float to 2^24.
BETWEEN = Rule(
    "select({1} - {2} * {T}(u32({3}) - 1u - i), {0} + {2} * {T}(i), i < u32({3}) / 2u)",
    compute="output",
)
DIAGONAL = Rule(lambda columns: f"select({{T}}(0), {{T}}(1), i / {columns}u == i % {columns}u)", compute="output")


def _corner(sign: str) -> tuple[Rule, Rule]:
    """A triangle's rule. Sizes are parameters, so that one shader serves every length of a causal mask; a byte cannot hold
    them: in the second rule they are written into it."""
    wide = f"select({{T}}(0), {{0}}, i32(i % u32({{1}})) - i32((i / u32({{1}})) % u32({{2}})) {sign} i32({{3}}))"

    def narrow(columns: int, rows: int, k: int) -> str:
        return f"select({{T}}(0), {{0}}, i32(i % {columns}u) - i32((i / {columns}u) % {rows}u) {sign} {k})"

    return Rule(wide, compute="input"), Rule(narrow, compute="input")


LOWER, UPPER = _corner("<="), _corner(">=")
EXACT = 1 << 24
WINDOW_SLACK = 512  # what aligning the ends of a binding may add


def _in_one_binding(tensor: torch.Tensor) -> torch.Tensor:
    """A larger tensor is computed in parts, and a part does not know its place: the CPU's."""
    nbytes = storage_nbytes(tensor.size(), tensor.stride(), tensor.dtype)
    if nbytes + WINDOW_SLACK > open_runtime().binding_limit:
        raise NoKernel
    return tensor


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
    try:
        return run(ZERO, aten.zero_.default, (0,), (), self)
    except NoKernel:
        return torch.as_tensor(fallback(aten.zero_.default, self))


def fill_tensor_(self: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.dim():
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dimensions."
        )
    return self.copy_(value.expand(self.shape)) if is_ours(value) else self.fill_(value.item())


def _counted_into(out: torch.Tensor, length: int, rule: Rule, op: Any, numbers: tuple[Any, ...]) -> torch.Tensor:
    """Run a rule of `i` over `length` elements of `out`, which keeps its shape and strides if it has as many."""
    if out.numel() != length:
        resized(out, (length,))
    return run(rule, op, numbers, (), _in_one_binding(out))


def arange(start: Any, end: Any, step: Any = 1, *, out: torch.Tensor) -> torch.Tensor:
    numbers = (start, end, step)
    if all(type(v) is int for v in numbers) and step != 0 and (end - start) * step >= 0 and out.dtype is torch.int64:
        shape: tuple[int, ...] = (-((start - end) // step),)  # the usual case; the rest, and what is wrong, is torch's
    else:
        try:
            shape = aten.arange.start_step(start, end, step, dtype=out.dtype, device=META).shape
        except RuntimeError:  # the CPU also says what is wrong with infinity
            aten.arange.start_step(start, end, step, dtype=out.dtype, device="cpu")
            raise
    if out.numel() not in (0, shape[0]):
        warnings.warn(  # torch's own words
            f"The number of elements in the out tensor of shape {list(out.shape)} is {out.numel()} which does not match the "
            f"computed number of elements {shape[0]}. Note that this may occur as a result of rounding error. "
            f"The out tensor will be resized to a tensor of shape ({shape[0]},).",
            stacklevel=2,
        )
        out.resize_(shape)
    return _counted_into(out, shape[0], STEPS, aten.arange.start_out, (start, step))


def linspace(start: Any, end: Any, steps: int, *, out: torch.Tensor) -> torch.Tensor:
    if steps < 0:
        raise RuntimeError("number of steps must be non-negative")
    if steps == 0:
        return resized(out, (0,))
    if steps == 1:
        return (out if out.numel() == 1 else resized(out, (1,))).fill_(start)
    if not out.is_floating_point() or steps >= EXACT:
        raise NoKernel
    step = (float(end) - float(start)) / (steps - 1)
    return _counted_into(out, steps, BETWEEN, aten.linspace.out, (start, end, step, steps))


def eye(n: int, m: int | None = None, *, out: torch.Tensor) -> torch.Tensor:
    columns = n if m is None else m
    if n < 0 or columns < 0:
        raise RuntimeError(f"n must be greater or equal to 0, got {min(n, columns)}")
    resized(out, (n, columns))
    return run(DIAGONAL, aten.eye.m_out, (), (columns,), _in_one_binding(out)) if out.numel() else out


def _triangle(op: Any, rule: Rule, narrow: Rule) -> Any:
    def triangle(self: torch.Tensor, diagonal: int = 0, *, out: torch.Tensor | None = None) -> Any:
        if self.dim() < 2 or max(self.shape[-2:]) >= EXACT:
            raise NoKernel
        operand = _in_one_binding(self)
        if out is not None:
            resized(out, self.shape)
        rows, columns = self.shape[-2:]
        # Further out than this nothing changes any more, and the number stays small.
        numbers = (columns, rows, max(-rows, min(columns, diagonal)))

        def shape() -> Any:
            return op(to_meta(self), diagonal) if out is None else out

        if self.dtype.itemsize < 4 and not self.is_floating_point():
            return run(narrow, op, (operand,), numbers, out, shape)
        return run(rule, op, (operand, *numbers), (), out, shape)

    return triangle


def efficient_zero_tensor(size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Zeros that autograd knows to be zeros, on devices that can mark them so; here they are plain."""
    return zero_(new_contiguous(size, dtype or torch.get_default_dtype()))


KERNELS: dict[str, Callable[..., Any]] = {
    "fill_.Tensor": fill_tensor_,
    "arange.start_out": arange,
    "linspace.out": linspace,
    "eye.out": eye,
    "eye.m_out": eye,
    "_efficientzerotensor": efficient_zero_tensor,
    "tril": _triangle(aten.tril.default, *LOWER),
    "tril.out": _triangle(aten.tril.out, *LOWER),
    "triu": _triangle(aten.triu.default, *UPPER),
    "triu.out": _triangle(aten.triu.out, *UPPER),
}


def register(library: torch.library.Library) -> None:
    register_pointwise(library, aten.fill.Scalar, FILL)
    library.impl("zero_", zero_, KEY)
    register_kernels(library, KERNELS)
