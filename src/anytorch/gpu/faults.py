"""Indices out of range, told by the kernels that met them and raised where the host waits for the device.

Looking at every index before its launch would cost a wait each. So kernels write the first bad one to a buffer of 32 bytes
(`wgsl.faults`), which travels beside the next read-back, or by itself at the next `synchronize` if such a kernel was
launched. With the setting `webgpu_checks` = now every such launch is waited for, and raises itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch import settings
from anytorch.gpu.buffers import Buffer
from anytorch.gpu.wgsl.faults import NBYTES, fault_of

if TYPE_CHECKING:
    from anytorch.gpu.runtime import Runtime

Site = tuple[
    str, str, tuple[int, ...]
]  # the op, what its indices are called, the dimension that each index tensor names


class OutOfRange(IndexError, RuntimeError):
    """An index out of range. Of the CPU's ops some raise IndexError for it and some, like gather, RuntimeError."""


class Faults:
    """The fault buffer of one device, and which ops the numbers in it stand for."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # on, off or now. Read once: a setting costs more than the launch of a small kernel.
        self.checks = str(settings.get("webgpu_checks"))
        self._buffer: Buffer | None = None
        self._numbers: dict[Site, int] = {}
        self._sites: list[Site] = []
        self.pending = False  # a kernel that can report was launched since the last look

    @property
    def buffer(self) -> Buffer:
        """The buffer that kernels report to; made on first use, by the device filled with zeros."""
        if self._buffer is None:
            with self._runtime.lock:
                self._buffer = self._buffer or self._runtime.pool.apart(NBYTES)
        return self._buffer

    def site(self, op: str, noun: str, dims: tuple[int, ...]) -> int:
        """The number, from 1 on, by which a kernel names this op."""
        site = (op, noun, dims)
        number = self._numbers.get(site)
        if number is None:
            with self._runtime.lock:
                if site not in self._numbers:
                    self._sites.append(site)
                    self._numbers[site] = len(self._sites)
                number = self._numbers[site]
        return number

    def reported_by(self, key: int) -> bool:
        """Whether this is the key of the buffer that kernels report to."""
        return self._buffer is not None and self._buffer.key == key

    def check(self, data: bytes) -> None:
        """Raise IndexError for what was read from the buffer, and clear it: each report is raised once (lock held)."""
        self.pending = False
        fault = fault_of(data)
        if fault is None:
            return
        self._runtime.encode_clear(self.buffer.handle, 0, self.buffer.nbytes)
        op, noun, dims = self._sites[fault.site - 1]
        said = f"{op}: {noun} {fault.value} is out of bounds for dimension {dims[fault.which]} with size {fault.size}"
        if self.checks != "now":
            said += (
                ". The op was launched before this call, which is the first to wait for the device; what it and later ops "
                "computed is invalid. Correct the indices; ANYTORCH_WEBGPU_CHECKS=now raises at the op itself (slow)."
            )
        raise OutOfRange(said)
