"""A piece of device memory, and how an array lies in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.types import dense_strides
from anytorch.lite.dtypes import Array


class Memory:
    """One buffer of the pool; it goes back when the last array that lies in it is gone."""

    __slots__ = ("buffer", "runtime")

    def __init__(self, nbytes: int) -> None:
        self.runtime = open_runtime()
        self.buffer = self.runtime.take(max(nbytes, 4))

    def __del__(self) -> None:
        if hasattr(self, "buffer"):
            self.runtime.give(self.buffer)


@dataclass(slots=True, eq=False)
class Layout:
    """Numbers of four bytes in a memory: strides and offset count numbers, not bytes. Never changed once made."""

    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def address(self) -> int:
        """As `gpu.launch` names a place: the buffer, and the first number in it."""
        return self.memory.buffer.address + 4 * self.offset

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def dense(self) -> bool:
        return all(s == t for s, t, n in zip(self.strides, dense_strides(self.shape), self.shape, strict=True) if n > 1)


def new(shape: tuple[int, ...]) -> Layout:
    return Layout(Memory(4 * prod(shape)), shape, dense_strides(shape))


def write(host: Array, dtype: type = np.float32) -> Layout:
    """`host` on the device, as float32 (or int32, for kernels that take indices)."""
    host = np.ascontiguousarray(host, dtype).reshape(host.shape)
    layout = new(host.shape)
    if host.size:
        layout.memory.runtime.write(layout.memory.buffer, 0, host.ctypes.data, host.nbytes)
    return layout


def read(layout: Layout, dtype: type = np.float32) -> Array:
    """A copy on the host; `layout` must be dense."""
    host: Array = np.empty(layout.shape, dtype)
    if host.size:
        layout.memory.runtime.read(layout.memory.buffer, 4 * layout.offset, host.ctypes.data, host.nbytes)
    return host
