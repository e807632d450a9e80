"""Launches kernels over several tensors at once (`gpu.wgsl.multi`): an optimizer's step is one launch per parameter."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK, SHIFT, TAG, Buffer
from anytorch.gpu.programs import Program
from anytorch.gpu.runtime import Runtime, device_memory, open_runtime
from anytorch.gpu.wgsl.multi import WORKGROUP, Multi, render
from anytorch.gpu.wgsl.types import supported
from anytorch.webgpu.pointwise import MOST_GROUPS, name_of
from anytorch.webgpu.tensors import aten

WINDOW_STEP = 256  # bindings start on multiples of this on every adapter


@dataclass(frozen=True)
class Plan:
    """All that does not change between two launches over tensors of the same geometry."""

    kernel: Multi
    elements: int
    sizes: tuple[int, ...]  # bytes of an element of each tensor, then each cell
    tensors: int
    pack: Callable[..., bytes]
    x: int
    y: int


_plans: dict[Any, Plan | None] = device_memory()
_UNKNOWN: Any = object()


def most_buffers() -> int:
    return int(open_runtime().limits["max-storage-buffers-per-shader-stage"])


def launch(
    body: str,
    tensors: Sequence[torch.Tensor],
    written: tuple[bool, ...],
    cells: Sequence[torch.Tensor] = (),
    cells_written: tuple[bool, ...] = (),
    numbers: dict[str, float] | None = None,
) -> bool:
    """Run `body` at every element. False: one launch cannot walk these tensors together (the caller falls back).

    They must be dense, of one size and layout, and of dtypes the adapter computes with.
    """
    key: list[Any] = [body, written, cells_written]
    addresses = []
    tagged = TAG
    for tensor in tensors:
        key += (tensor.dtype, tensor.size(), tensor.stride())
        address = tensor.data_ptr()
        tagged &= address
        addresses.append(address)
    for cell in cells:
        key += (cell.dtype, cell.numel())
        address = cell.data_ptr()
        tagged &= address
        addresses.append(address)
    identity = tuple(key)
    plan = _plans.get(identity, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = _plans[identity] = _make_plan(body, tensors, written, cells, cells_written, tuple(numbers or ()))
    if plan is None:
        return False
    if not plan.elements:
        return True
    if not tagged or any(address & 3 for address in addresses):
        return False  # not all on this device; or a word is shared with an element that is not ours to write
    runtime = open_runtime()
    table = runtime.buffers
    buffers = [table[address >> SHIFT] for address in addresses]
    program = _program(runtime, plan.kernel, len({buffer.key for buffer in buffers}) < len(buffers))
    values = numbers.values() if numbers else ()
    limit = runtime.binding_limit
    for buffer in buffers:
        if buffer.nbytes > limit:
            _in_windows(runtime, plan, program, buffers, addresses, tuple(values))
            return True
    places = [(address & OFFSET_MASK) // size for address, size in zip(addresses, plan.sizes, strict=True)]
    immediates = plan.pack(plan.elements, plan.x * WORKGROUP, *places, *values)
    runtime.dispatch(program, buffers, immediates, plan.x, plan.y)
    return True


def _make_plan(
    body: str,
    tensors: Sequence[torch.Tensor],
    written: tuple[bool, ...],
    cells: Sequence[torch.Tensor],
    cells_written: tuple[bool, ...],
    numbers: tuple[str, ...],
) -> Plan | None:
    first = tensors[0]
    features = open_runtime().features
    if (
        any(t.shape != first.shape or t.stride() != first.stride() for t in tensors)
        or not aten.is_non_overlapping_and_dense(first)
        or any(t.dtype is torch.float64 or not supported(name_of(t.dtype), features) for t in tensors)
        or any(c.dtype is not torch.float32 or c.numel() != 1 for c in cells)
        or len(tensors) + len(cells) > most_buffers()
    ):
        return None
    names = tuple(name_of(t.dtype) for t in tensors)
    kernel = Multi(body, names, written, len(cells), cells_written or (False,) * len(cells), numbers)
    elements = first.numel()
    x, y = _groups(elements, kernel)
    return Plan(
        kernel=kernel,
        elements=elements,
        sizes=tuple(t.dtype.itemsize for t in (*tensors, *cells)),
        tensors=len(tensors),
        pack=struct.Struct(f"<{2 + kernel.buffers}I{len(numbers)}f").pack,
        x=x,
        y=y,
    )


def _groups(elements: int, kernel: Multi) -> tuple[int, int]:
    groups = math.ceil(elements / (kernel.per_thread * WORKGROUP))
    x = min(groups, MOST_GROUPS)
    return x, math.ceil(groups / x) if x else 0


def _program(runtime: Runtime, kernel: Multi, shared: bool) -> Program:
    if shared:
        kernel = Multi(**{**kernel.__dict__, "shared": True})
    found = runtime.programs.get(kernel)
    if found is not None:
        return found
    return runtime.programs.make(
        kernel,
        lambda: render(kernel),
        buffers=kernel.buffers,
        writable=kernel.writable,
        immediates=4 * kernel.words,
    )


def _in_windows(
    runtime: Runtime,
    plan: Plan,
    program: Program,
    buffers: list[Buffer],
    addresses: list[int],
    values: tuple[float, ...],
) -> None:
    """Tensors beyond the binding limit, in parts. A cell's place does not move with the elements."""
    most = (runtime.binding_limit // max(plan.sizes) - WINDOW_STEP) // WINDOW_STEP * WINDOW_STEP
    for start in range(0, plan.elements, most):
        length = min(most, plan.elements - start)
        windows, places = [], []
        for i, (buffer, address, size) in enumerate(zip(buffers, addresses, plan.sizes, strict=True)):
            own = i < plan.tensors
            begin = (address & OFFSET_MASK) + (start * size if own else 0)
            base = begin // WINDOW_STEP * WINDOW_STEP
            span = begin - base + (length if own else 1) * size
            windows.append((base, min(math.ceil(span / 16) * 16, buffer.nbytes - base)))
            places.append((begin - base) // size)
        x, y = _groups(length, plan.kernel)
        immediates = plan.pack(length, x * WORKGROUP, *places, *values)
        runtime.dispatch(program, buffers, immediates, x, y, windows=tuple(windows))
