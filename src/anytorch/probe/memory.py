"""The machine's memory and the size of /dev/shm."""

from __future__ import annotations

import os
import sys

from anytorch.probe.cgroup import Limits
from anytorch.probe.facts import Memory
from anytorch.probe.tree import Tree, whole


def read_memory(tree: Tree, limits: Limits) -> Memory:
    """Memory of a Linux machine, with the control group's limit beside it."""
    values: dict[str, int] = {}
    for line in (tree.text("/proc/meminfo") or "").splitlines():
        key, _, rest = line.partition(":")
        number = whole(rest.removesuffix(" kB"), high=2**54)
        if number is not None:
            values[key] = number * 1024
    available = values.get("MemAvailable")
    if available is None and "MemFree" in values:  # kernels before 3.14, some sandboxes
        available = values["MemFree"] + values.get("Cached", 0) + values.get("Buffers", 0)
    total = values.get("MemTotal")
    return Memory(total, available, limits.memory, limits.memory_used, read_shm(tree))


def read_shm(tree: Tree) -> int | None:
    """The size of /dev/shm: torch's data loaders pass tensors through it, and containers get 64 MiB by default."""
    if tree.real and hasattr(os, "statvfs"):
        try:
            found = os.statvfs("/dev/shm")
        except OSError:
            return None  # there is none, which is no fault
        return found.f_blocks * found.f_frsize
    size = None
    for line in (tree.text("/proc/self/mountinfo", 1024 * 1024) or "").splitlines():
        left, dash, right = line.partition(" - ")
        fields, options = left.split(), right.split()
        if dash and len(fields) > 4 and fields[4] == "/dev/shm" and len(options) > 2:
            for option in options[2].split(","):
                if option.startswith("size=") and option.endswith("k"):
                    kib = whole(option[5:-1], high=2**54)
                    size = kib * 1024 if kib is not None else size  # the last mount on it is the one in use
    return size


def read_windows_memory() -> Memory:
    """Memory of a Windows machine by GlobalMemoryStatusEx; unknown elsewhere."""
    unknown = Memory(None, None, None, None)
    if sys.platform == "win32":
        import ctypes

        names = ("total", "available", "page_total", "page_available", "virtual_total", "virtual_available", "extended")

        class MemoryStatus(ctypes.Structure):  # MEMORYSTATUSEX
            _fields_ = (
                ("length", ctypes.c_uint32),
                ("load", ctypes.c_uint32),
                *((name, ctypes.c_uint64) for name in names),
            )

        status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
        # BOOL GlobalMemoryStatusEx(LPMEMORYSTATUSEX)
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return Memory(int(status.total), int(status.available), None, None)
    return unknown
