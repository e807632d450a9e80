"""Launches kernels over several tensors at once (`gpu.wgsl.multi`): an optimizer's step is one launch per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anytorch.gpu.buffers import SHIFT, TAG
from anytorch.gpu.launch import Plan
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.multi import WORKGROUP, Multi, render
from anytorch.webgpu.dtypes import name_of, usable
from anytorch.webgpu.launch import plan_over
from anytorch.webgpu.oversize import Windows, in_windows, window_of
from anytorch.webgpu.tensors import aten

UNABLE = "one launch cannot walk these tensors together"


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
    shared = len({address >> SHIFT for address in addresses}) < len(addresses)
    key.append(shared)
    identity = tuple(key)
    plan = plans[identity]
    if plan is None:
        plan = plans[identity] = _make_plan(body, tensors, written, cells, cells_written, tuple(numbers or ()), shared)
    if plan is UNABLE:
        return False
    if not tensors[0].numel():
        return True
    if not tagged or any(address & 3 for address in addresses):
        return False  # not all on this device; or a word is shared with an element that is not ours to write
    values = numbers.values() if numbers else ()
    try:
        plan(addresses, *values)
    except BindingTooLarge:
        _in_parts(plan.program.key, tensors, cells, tuple(values))
    return True


def _make_plan(
    body: str,
    tensors: Sequence[torch.Tensor],
    written: tuple[bool, ...],
    cells: Sequence[torch.Tensor],
    cells_written: tuple[bool, ...],
    numbers: tuple[str, ...],
    shared: bool,
) -> Plan | str:
    first = tensors[0]
    if (
        any(t.shape != first.shape or t.stride() != first.stride() for t in tensors)
        or not aten.is_non_overlapping_and_dense(first)
        or not usable(*[t.dtype for t in tensors])
        or any(c.dtype is not torch.float32 or c.numel() != 1 for c in cells)
        or len(tensors) + len(cells) > most_buffers()
    ):
        return UNABLE
    names = tuple(name_of(t.dtype) for t in tensors)
    kernel = Multi(body, names, written, len(cells), cells_written or (False,) * len(cells), numbers, shared)
    return _plan_of(kernel, first.numel(), [*tensors, *cells])


def _plan_of(kernel: Multi, elements: int, tensors: Sequence[torch.Tensor]) -> Plan:
    places = [tensor.dtype.itemsize for tensor in tensors]
    numbers = "f" * len(kernel.numbers)
    return plan_over(elements, kernel, render, places, kernel.writable, WORKGROUP, kernel.per_thread, numbers=numbers)


def _in_parts(
    kernel: Multi, tensors: Sequence[torch.Tensor], cells: Sequence[torch.Tensor], values: tuple[float, ...]
) -> None:
    """Tensors beyond the binding limit, in parts of their memory. A cell's place does not move with the elements."""

    def launch(parts: list[torch.Tensor], windows: Windows) -> None:
        bound = [*parts, *cells]
        _plan_of(kernel, parts[0].numel(), bound).within(
            (*windows, *map(window_of, cells)), [tensor.data_ptr() for tensor in bound], *values
        )

    in_windows([tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors], launch)
