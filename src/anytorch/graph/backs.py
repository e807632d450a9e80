"""Which back end runs the kernels of a graph on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from anytorch.devices.locate import locate
from anytorch.errors import NativeUnavailable
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.loops import Kernel
from anytorch.graph.partition import MOST_BUFFERS

Launch = Callable[[Sequence[torch.Tensor], Mapping[str, int]], None]


@dataclass(frozen=True)
class Back:
    """`candidates` lists the schedules worth trying for a kernel, or the first few; `render` gives a text, `prepare`
    compiles it; `compile_ahead` compiles many schedules at once, for the tensors they will be called with. `splits`: its
    schedules divide long loops among units, so that the graph need not be rewritten for that. `target` is what texts are
    compiled for, where a setting may change that: what was measured for another one does not hold."""

    name: str
    candidates: Callable[[Kernel, Mapping[str, int], int | None], list[Schedule]]
    render: Callable[[Kernel, Schedule], str]
    prepare: Callable[[Kernel, Schedule], Launch]
    compile_ahead: Callable[[Kernel, Sequence[Schedule], Sequence[torch.Tensor], Mapping[str, int]], None]
    splits: bool
    repeats: bool  # computing a small product again in every tile costs less than another launch
    most_buffers: int = MOST_BUFFERS  # that a kernel may read and write: a group of ops with more is divided
    considered: Callable[[Kernel, Mapping[str, int]], list[Schedule]] | None = None  # candidates and others, sooner
    target: str = ""

    def schedule(self, kernel: Kernel, known: Mapping[str, int], name: str) -> Schedule | None:
        """The candidate of this name, to prepare it once more; None if there is none."""
        every = self.considered(kernel, known) if self.considered else self.candidates(kernel, known, None)
        return next((one for one in every if one.name == name), None)


_registered: dict[str, Callable[[], Back]] = {}


def register(device_type: str, make: Callable[[], Back]) -> None:
    """Register what launches kernels on a type of device above this layer; `make` is asked when a graph needs it."""
    _registered[device_type] = make


def back_of(device: torch.device) -> tuple[Back | None, str]:
    """The back end for a device; without one, None and the reason: torch then computes the graph."""
    if device.type in _registered:
        return _registered[device.type](), ""
    if device.type == "cpu":
        return _cpp()
    backend, index = locate(device)
    caps = backend.caps(index)
    if caps.triton:
        return _triton(device)
    return None, f"no kernels for {device}: {caps.no_triton or 'there is no emitter for such a device yet'}"


def _triton(device: torch.device) -> tuple[Back | None, str]:
    from anytorch.graph.back import triton
    from anytorch.graph.emit import triton as emit

    return Back(
        "triton", partial(triton.candidates, device), emit.render, triton.prepare, triton.compile_ahead, True, True
    ), ""


def _cpp() -> tuple[Back | None, str]:
    from anytorch import native
    from anytorch.graph.back import cpp

    try:
        cpp.ready()
    except NativeUnavailable as exc:
        return None, exc.message
    return Back(
        "cpp",
        cpp.candidates,
        cpp.render,
        cpp.prepare,
        cpp.compile_ahead,
        True,
        False,
        considered=cpp.considered,
        target=native.level().name,
    ), ""
