"""The memory of the machine and of this process, and the limits of its control groups."""

from __future__ import annotations

import os
import posixpath
import sys
from collections.abc import Iterator

from anytorch.probe.facts import Memory
from anytorch.probe.tree import Tree, fields, whole
from anytorch.values import dataclass


def read_memory(tree: Tree, limits: Limits) -> Memory:
    """Memory of a Linux machine, with the control group's limit beside it."""
    told = fields(tree.text("/proc/meminfo"))
    values = {
        name: kib * 1024
        for name, text in told.items()
        if (kib := whole(text.removesuffix(" kB"), high=2**54)) is not None
    }
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
    for place, options in _mount_lines(tree):
        if place[4] == "/dev/shm" and len(options) > 2:
            for option in options[2].split(","):
                if option.startswith("size=") and option.endswith("k"):
                    kib = whole(option[5:-1], high=2**54)
                    size = kib * 1024 if kib is not None else size  # the last mount on it is the one in use
    return size


def _mount_lines(tree: Tree) -> Iterator[tuple[list[str], list[str]]]:
    """The words of each line of /proc/self/mountinfo, before its dash (the fifth is the mount point) and after it."""
    for line in (tree.text("/proc/self/mountinfo", 1024 * 1024) or "").splitlines():
        left, _, right = line.partition(" - ")
        if len(left.split()) > 4 and right.strip():
            yield left.split(), right.split()


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


# --- control groups, version 1 and 2 ----------------------------------------------------------------------------------

# The limit that counts is the smallest on the way from our own group up to the top one we can see: a group without a limit
# of its own is still held by its parent's.

# Version 1 writes "no limit" as the largest multiple of the page size: 9223372036854771712 with pages of 4 KiB.
NO_LIMIT = 2**60
DEEPEST = 64


@dataclass(frozen=True)
class Limits:
    cpus: float | None = None  # None: no limit
    memory: int | None = None
    memory_used: int | None = None  # counted against `memory`; file cache that can be dropped is left out


def read_cgroup(tree: Tree) -> Limits:
    own = _own_groups(tree)
    mounts = _mounts(tree)
    cpus: list[float] = []
    memory: list[tuple[int, int | None]] = []
    for controller in ("", "cpu", "memory"):  # "" is version 2, whose one hierarchy has every controller
        if controller not in own or controller not in mounts:
            continue
        for folder in _upwards(tree, own[controller], *mounts[controller]):
            if controller != "memory" and (quota := _quota(tree, folder, controller)) is not None:
                cpus.append(quota)
            if controller != "cpu" and (limit := _memory(tree, folder, controller)) is not None:
                memory.append(limit)
    if not memory:
        return Limits(min(cpus, default=None))
    smallest = min(limit for limit, _ in memory)
    # A parent may have less room left than we do: its other children use it too. The least room is what counts.
    rooms = [limit - used for limit, used in memory if used is not None]
    used = max(0, smallest - max(0, min(rooms))) if rooms else None
    return Limits(min(cpus, default=None), smallest, used)


def _own_groups(tree: Tree) -> dict[str, str]:
    """Controller → our path in its hierarchy; "" stands for version 2. From lines such as "4:memory:/docker/1f"."""
    groups: dict[str, str] = {}
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not number.isdigit():
            continue
        for controller in controllers.split(","):
            groups[controller] = path
    return groups


def _mounts(tree: Tree) -> dict[str, tuple[str, str]]:
    """Controller → (mount point, the group that is mounted there), from /proc/self/mountinfo or the usual places."""
    mounts: dict[str, tuple[str, str]] = {}
    for place, kind in _mount_lines(tree):
        controllers = (
            [""] if kind[0] == "cgroup2" else kind[2].split(",") if kind[0] == "cgroup" and len(kind) > 2 else []
        )
        for controller in controllers:
            # Network plug-ins mount the tree a second time elsewhere (/run/cilium/cgroupv2); the usual place wins.
            if controller in ("", "cpu", "memory") and (
                controller not in mounts or place[4].startswith("/sys/fs/cgroup")
            ):
                mounts[controller] = (place[4], place[3])
    if not mounts:
        mounts = {"": ("/sys/fs/cgroup", "/"), "memory": ("/sys/fs/cgroup/memory", "/")}
        joined = "/sys/fs/cgroup/cpu,cpuacct"
        mounts["cpu"] = (joined if tree.is_folder(joined) else "/sys/fs/cgroup/cpu", "/")
    return mounts


def _upwards(tree: Tree, own: str, mount_point: str, mounted: str) -> Iterator[str]:
    """The folders from our group up to the mount point. Without a cgroup namespace a container sees the host's path
    in /proc/self/cgroup, while only its own group is mounted: then that path's head is cut off."""
    below = posixpath.normpath("/" + own.lstrip("/"))
    top = posixpath.normpath("/" + mounted.lstrip("/"))
    if top != "/" and (below == top or below.startswith(top + "/")):
        below = below[len(top) :] or "/"
    folder = posixpath.normpath(mount_point + below)
    if not tree.is_folder(folder):
        folder = mount_point
    for _ in range(DEEPEST):
        yield folder
        if folder == mount_point or not folder.startswith(mount_point):
            return
        folder = posixpath.dirname(folder)


def _quota(tree: Tree, folder: str, controller: str) -> float | None:
    if controller == "":
        parts = (tree.text(f"{folder}/cpu.max") or "").split()
        quota, period = (parts[0], parts[1]) if len(parts) > 1 else (None, None)
    else:
        quota, period = tree.text(f"{folder}/cpu.cfs_quota_us"), tree.text(f"{folder}/cpu.cfs_period_us")
    microseconds, per = whole(quota, high=NO_LIMIT), whole(period, high=NO_LIMIT)  # "max" and "-1" are no numbers here
    return microseconds / per if microseconds and per else None


def _memory(tree: Tree, folder: str, controller: str) -> tuple[int, int | None] | None:
    v2 = controller == ""
    limit = tree.number(f"{folder}/" + ("memory.max" if v2 else "memory.limit_in_bytes"))
    if limit is None or not 0 < limit < NO_LIMIT:
        return None
    used = tree.number(f"{folder}/" + ("memory.current" if v2 else "memory.usage_in_bytes"))
    if used is None:
        return limit, None
    # The kernel drops inactive file pages before it refuses memory, so they are as good as free (kubelet's rule too).
    key = "inactive_file " if v2 else "total_inactive_file "
    for line in (tree.text(f"{folder}/memory.stat") or "").splitlines():
        if line.startswith(key):
            used = max(0, used - (whole(line[len(key) :]) or 0))
    return limit, used


def resident_bytes() -> tuple[int | None, int | None]:
    """Resident size now and at its highest, in bytes; None where the system does not tell."""
    now = peak = None
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("VmRSS:"):
                    now = int(line.split()[1]) * 1024
                elif line.startswith("VmHWM:"):
                    peak = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a sandbox without it: asked of getrusage below
    if peak is None and sys.platform != "win32":
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is bytes on macOS and kilobytes elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return now, peak
