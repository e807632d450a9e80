"""CPU and memory limits of the control groups this process is in, version 1 and 2.

The limit that counts is the smallest on the way from our own group up to the top one we can see: a group without a
limit of its own is still held by its parent's.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from anytorch.probe.tree import Tree, whole
from anytorch.values import dataclass

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
    for line in (tree.text("/proc/self/mountinfo", 1024 * 1024) or "").splitlines():
        left, dash, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not dash or len(fields) < 5 or not kind:
            continue
        controllers = (
            [""] if kind[0] == "cgroup2" else kind[2].split(",") if kind[0] == "cgroup" and len(kind) > 2 else []
        )
        for controller in controllers:
            # Network plug-ins mount the tree a second time elsewhere (/run/cilium/cgroupv2); the usual place wins.
            if controller in ("", "cpu", "memory") and (
                controller not in mounts or fields[4].startswith("/sys/fs/cgroup")
            ):
                mounts[controller] = (fields[4], fields[3])
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
