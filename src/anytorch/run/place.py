"""The device that does the work while a program believes in CUDA."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from anytorch.devices.choose import Resolution, activate
from anytorch.devices.registry import registry
from anytorch.devices.types import Caps, MemoryUse
from anytorch.probe.memory import resident_bytes

NAME = "cuda"  # what programs call it
HOST = "cpu"
Device = torch.device
FRESH_S = 0.5  # the host's memory is read from a dozen files: not at every step of a loop that logs it
BAD_ORDINAL = "CUDA error: invalid device ordinal"


class Place:
    """The stand-in's device or devices: `cuda:n` of the program is the n-th of `indices`.

    `host` is True where the CPU stands in for itself: then both worlds share one memory.
    """

    def __init__(self, chosen: Resolution) -> None:
        candidate = chosen.chosen
        activate(candidate)
        backend: Any = registry().get(candidate.backend)
        self.resolution = chosen
        self.backend: Any = backend
        self.kind = candidate.torch_type
        self.host = self.kind == HOST
        self.module: Any = self.backend.module()
        first = candidate.index or 0
        there = range(1 if self.host else int(self.module.device_count()))
        self.indices = [first, *(index for index in there if index != first)]
        self.current = 0  # the program's torch.cuda.current_device()
        self.reals = [Device(HOST) if self.host else Device(self.kind, index) for index in self.indices]
        self.shown = [Device(NAME, place) for place in range(len(self.indices))]
        self.shown_of = {real: self.shown[place] for place, real in enumerate(self.reals)}
        self._peak_read: int | None = None  # since a reset, where the back end cannot reset its own
        self._highest = 0  # of the peaks that the program has reset
        self._host_memory: tuple[float, MemoryUse] | None = None
        self._known: dict[Any, torch.device | None] = {}  # answers of `of`

    # --- names -------------------------------------------------------------------------------------------------------

    def count(self) -> int:
        """How many devices the program sees: CUDA_VISIBLE_DEVICES hides ours, too."""
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        if mask is None:
            return len(self.reals)
        listed = 0
        for entry in mask.split(","):  # as CUDA does, up to the first entry that is none
            if not entry.strip() or entry.strip().startswith("-"):
                break
            listed += 1
        return min(listed, len(self.reals))

    def real(self, index: int | None = None) -> torch.device:
        """The device that the program's `cuda:index` is. Raises RuntimeError, as CUDA does, where there is no such."""
        place = self.current if index is None or index == -1 else index
        if not 0 <= place < len(self.reals):
            raise RuntimeError(f"{BAD_ORDINAL}: cuda:{place} was asked for, and there are {len(self.reals)} here")
        return self.reals[place]

    def of(self, where: Any) -> torch.device | None:
        """The real device that "cuda", "cuda:1", a torch.device or a number means; None if it means no CUDA device."""
        kind = where.__class__
        if kind is Device or kind is str:
            try:
                return self._known[where]
            except KeyError:
                device = Device(where) if kind is str and where.startswith(NAME) else where
                if (kind is str and device is where) or device.type != NAME:
                    self._known[where] = None
                    return None
                real = self.real(device.index)
                if device.index is not None or len(self.reals) == 1:  # else it is the current one, whichever that is
                    self._known[where] = real
                return real
        return self.real(where) if kind is int else None

    def index_of(self, where: Any) -> int:
        """The program's number of a device, for functions of torch.cuda: None is the current one."""
        if where is None:
            return self.current
        if isinstance(where, int):
            index: int | None = where
        else:
            device = Device(where) if isinstance(where, str) else where
            if isinstance(device, Device) and device.type == self.kind and not self.host:
                device = self.shown_of[Device(self.kind, device.index or 0)]
            if not isinstance(device, Device) or device.type != NAME:
                raise ValueError(f"Expected a cuda device, but got: {where}")
            index = device.index
        self.real(index)
        return self.current if index is None or index == -1 else index

    # --- facts -------------------------------------------------------------------------------------------------------

    def caps(self, index: int) -> Caps:
        caps: Caps = self.backend.caps(self.indices[index])
        return caps

    def name_of(self, index: int) -> str:
        return str(self.backend.device_name(self.indices[index]))

    def memory(self, index: int) -> MemoryUse:
        if self.host:
            return self._memory_of_host()
        use: MemoryUse = self.backend.memory(self.indices[index])
        return use

    def _memory_of_host(self) -> MemoryUse:
        now = time.monotonic()
        if self._host_memory is None or now - self._host_memory[0] > FRESH_S:
            self._host_memory = now, registry().get(HOST).memory(0)
        return self._host_memory[1]

    def free_and_total(self, index: int) -> tuple[int, int]:
        """Bytes free and in all: the device's, else what the probes saw, else the host's. Programs plan with them, so a
        device that does not tell is not one without memory."""
        use, candidate = self.memory(index), self.resolution.chosen
        total = use.total or candidate.total
        if total is None:
            host = self._memory_of_host()
            return host.free or 0, host.total or 0
        free = use.free if use.free is not None else candidate.free
        return (total - self.allocated(index) if free is None else free), total

    def allocated(self, index: int) -> int:
        """Bytes in use: of the device's tensors, or of the process where the device is the CPU."""
        return (resident_bytes()[0] if self.host else self.memory(index).allocated) or 0

    def peak(self, index: int) -> int:
        if self._peak_read is None:
            return (resident_bytes()[1] if self.host else self.memory(index).peak) or self.allocated(index)
        self._peak_read = max(self._peak_read, self.allocated(index))
        return self._peak_read

    def highest(self, index: int) -> int:
        """The peak since the start, whatever the program has reset."""
        return max(self._highest, self.peak(index))

    def reset_peak(self, index: int) -> None:
        """Start a new peak: the back end's own, or the most that is read from now on where it keeps only one."""
        self._highest = self.highest(index)
        reset = getattr(self.module, "reset_peak_memory_stats", None)
        if callable(reset):
            reset(self.indices[index])
        else:
            self._peak_read = self.allocated(index)

    def synchronize(self, index: int | None = None) -> None:
        self.backend.synchronize(self.indices[self.current if index is None else index])

    def start_timing(self) -> None:
        """Add up the device's working time from now on, where it has a clock for that."""
        if self.has("start_timing"):
            self.module.start_timing()

    def device_seconds(self) -> float | None:
        """How long the device worked: all threads of the CPU, or by the device's own clock; None where it has none."""
        if self.host:
            return time.process_time()
        if not self.has("device_seconds"):
            return None
        seconds: float | None = self.module.device_seconds()
        return seconds

    def has(self, name: str) -> bool:
        """Whether the device's own module has a function or class of that name."""
        return not self.host and callable(getattr(self.module, name, None))
