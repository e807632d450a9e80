"""Kernel graphs on the webgpu device: text of `graph.emit.wgsl`, launched like every other kernel (`gpu.launch`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from anytorch.gpu.launch import Plan, grid
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.graph import handwritten
from anytorch.graph.backs import Back, Launch, register
from anytorch.graph.emit import wgsl
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import sizes_of
from anytorch.graph.emit.wgsl_schedules import schedules
from anytorch.graph.loops import Kernel
from anytorch.graph.partition import MOST_BUFFERS
from anytorch.webgpu.folds import has_subgroups
from anytorch.webgpu.graph_kernels import KERNELS
from anytorch.webgpu.tensors import NAME

BINDS = "max-storage-buffers-per-shader-stage"


def back() -> Back:
    """The back end for the open device."""
    render = partial(wgsl.render, features=_features())
    most = min(MOST_BUFFERS, int(open_runtime().limits[BINDS]))
    return Back("wgsl", candidates, render, prepare, _nothing, splits=False, repeats=False, most_buffers=most)


def candidates(kernel: Kernel, known: Mapping[str, int]) -> list[Schedule]:
    """Raises NotImplementedError for a kernel that this device's shaders cannot compute."""
    runtime = open_runtime()
    most = int(runtime.limits[BINDS])
    if len(kernel.buffers) > most:
        raise NotImplementedError(f"{len(kernel.buffers)} buffers are more than this device binds at once, {most}")
    return schedules(kernel, known, software=runtime.adapter.software, features=_features())


def _features() -> frozenset[str]:
    """What shaders may use. A software adapter has subgroups of a few lanes that are slower than its shared memory."""
    runtime = open_runtime()
    return frozenset(runtime.features) - (frozenset() if has_subgroups(runtime) else {"subgroup"})


def prepare(kernel: Kernel, schedule: Schedule) -> Launch:
    """A kernel that takes the tensors of its buffers, which are contiguous, and the named sizes."""
    text = wgsl.render(kernel, schedule, _features())
    names = sizes_of(kernel)

    def launch(tensors: Sequence[torch.Tensor], known: Mapping[str, int]) -> None:
        key = (text, *[known[name] for name in names])
        plan = plans[key]
        if plan is None:
            plan = plans[key] = _planned(kernel, schedule, text, known)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if not all(addresses):  # an empty operand has no buffer; one of another operand stands in and is never read
            if not any(
                tensor.numel() for tensor, buffer in zip(tensors, kernel.buffers, strict=True) if buffer.written
            ):
                return
            stand_in = next(address for address in addresses if address)
            addresses = [address or stand_in for address in addresses]
        plan(addresses)

    return launch


def _planned(kernel: Kernel, schedule: Schedule, text: str, known: Mapping[str, int]) -> Plan:
    workers = wgsl.workers(kernel, schedule, known)
    groups = grid(workers if schedule.lanes > 1 else -(-workers // wgsl.THREADS))
    row = groups[0] * (1 if schedule.lanes > 1 else wgsl.THREADS)
    read = [getattr(torch, buffer.dtype).itemsize for buffer in kernel.buffers if not buffer.written]
    written = len(kernel.buffers) - len(read)
    writable = ((1 << written) - 1) << len(read)
    sizes = [known[name] for name in sizes_of(kernel)]
    return Plan(text, str, groups, read, writable, unplaced=written, head=(row, *sizes))


def _nothing(
    kernel: Kernel, schedules: Sequence[Schedule], tensors: Sequence[torch.Tensor], known: Mapping[str, int]
) -> None:
    """Compile nothing ahead: shaders are compiled when they are first launched, and few are tried."""


def register_back() -> None:
    register(NAME, back)
    handwritten.register(*KERNELS)
