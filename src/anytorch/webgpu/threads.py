"""Launches `gpu.wgsl.threads` kernels on tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, Buffer
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.threads import WORKGROUP, Threads, render
from anytorch.gpu.wgsl.types import KINDS, supported
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.kernels import to_meta
from anytorch.webgpu.pointwise import MOST_GROUPS, name_of
from anytorch.webgpu.tensors import new_tensor

_CODES = {"u32": "I", "i32": "i", "f32": "f"}


def computable(*dtypes: torch.dtype) -> bool:
    """Can shaders on this adapter read all of these?"""
    features = open_runtime().features
    return all(supported(name_of(dtype), features) for dtype in dtypes)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype a kernel writes for a result of `dtype`: itself, or a 32-bit one to be cast afterwards."""
    kind = KINDS[name_of(dtype)]
    if kind.lanes == 1:
        return dtype
    return torch.float32 if kind.floating else torch.int32


def narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in `dtype`, with its strides."""
    if tensor.dtype is dtype:
        return tensor
    made = new_tensor(tensor.size(), tensor.stride(), dtype)
    return on_device(tensor, made)


class Launch:
    """A kernel with all its numbers; only the tensors change between two calls."""

    __slots__ = ("head", "pack", "program", "shifts", "tail", "x", "y")

    def __init__(
        self,
        inputs: Sequence[tuple[str, torch.Tensor]],
        outputs: Sequence[tuple[str, torch.Tensor]],
        parameters: Sequence[tuple[str, str, Any]],
        count: int,
        body: str,
        functions: str = "",
    ) -> None:
        runtime = open_runtime()
        kernel = Threads(
            tuple((name, name_of(tensor.dtype)) for name, tensor in inputs),
            tuple((name, name_of(tensor.dtype)) for name, tensor in outputs),
            tuple(f"{name}: {kind}" for name, kind, _ in parameters),
            body,
            functions,
        )
        self.program = runtime.programs.get(kernel) or runtime.programs.make(
            kernel,
            lambda: render(kernel),
            buffers=len(inputs) + len(outputs),
            writable=kernel.writable,
            immediates=4 * kernel.words,
        )
        groups = -(-count // WORKGROUP)
        self.x = min(groups, MOST_GROUPS)
        self.y = -(-groups // self.x)
        self.head = struct.pack("<2I", count, self.x * WORKGROUP)
        self.pack = struct.Struct(f"<{len(inputs) + len(outputs)}I").pack
        codes = "".join(_CODES[kind] for _, kind, _ in parameters)
        self.tail = struct.pack(f"<{codes}", *[value for _, _, value in parameters])
        self.shifts = [t.dtype.itemsize.bit_length() - 1 for _, t in (*inputs, *outputs)]

    def __call__(self, *tensors: torch.Tensor) -> None:
        runtime = open_runtime()
        table = runtime.buffers
        buffers: list[Buffer | None] = []
        offsets = []
        empty = False
        for tensor, shift in zip(tensors, self.shifts, strict=True):
            address = tensor.data_ptr()
            empty |= address == 0
            buffers.append(table[address >> SHIFT] if address else None)
            offsets.append((address & OFFSET_MASK) >> shift)
        if empty:  # an empty operand has no buffer; one of another operand stands in and is never read
            stand_in = next(buffer for buffer in buffers if buffer is not None)
            buffers = [buffer if buffer is not None else stand_in for buffer in buffers]
        immediates = self.head + self.pack(*offsets) + self.tail
        runtime.dispatch(self.program, cast("list[Buffer]", buffers), immediates, self.x, self.y)


def launch(
    inputs: Sequence[tuple[str, torch.Tensor]],
    outputs: Sequence[tuple[str, torch.Tensor]],
    parameters: Sequence[tuple[str, str, Any]],
    count: int,
    body: str,
    functions: str = "",
) -> None:
    """Run `body` for i in range(count). `parameters` are (name, WGSL type, value)."""
    if count:
        whole = Launch(inputs, outputs, parameters, count, body, functions)
        whole(*[tensor for _, tensor in (*inputs, *outputs)])


_results: dict[Any, Any] = {}


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype
    return tuple(value) if isinstance(value, list) else value


def result_of(op: Any, *args: Any) -> Any:
    """What `op` returns for these arguments, as meta tensors: sizes, strides, dtypes, and torch's own errors."""
    key = (op, *[_frozen(value) for value in args])
    made = _results.get(key)
    if made is None:
        made = _results[key] = op(*[to_meta(value) for value in args])
    return made


def new_wide(like: torch.Tensor) -> torch.Tensor:
    """A tensor with the geometry of a meta tensor, in the dtype a kernel can write it in."""
    return new_tensor(like.size(), like.stride(), wide(like.dtype))


def with_out(function: Any) -> Any:
    """The `out=` form of a kernel with one result: computed beside, then copied."""

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        name = next(name for name in ("out", "grad_input") if name in kwargs)
        out: torch.Tensor = kwargs.pop(name)
        return _copied(function(*args, **kwargs), out)

    return kernel


def _copied(made: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if out.shape != made.shape:
        torch._prims_common.wrappers._maybe_resize_out(out, made.shape)
    return out.copy_(made)
