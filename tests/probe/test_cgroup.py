from __future__ import annotations

from typing import Any

import pytest

from anytorch.probe import snapshot
from anytorch.probe.memory import Limits, read_cgroup
from anytorch.probe.tree import Tree

GIB = 1024**3

# /proc/self/mountinfo and /proc/self/cgroup of the H200 machine this project tests on, 2026-11-15 (version 2).
V2_MOUNT = (
    "32 23 0:28 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
)
V2_OWN = "0::/process_api/8049a129217bd2388d62556b0478d60c\n"
# The same of the development machine, 2026-11-15 (version 1 and 2 side by side).
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
V1_OWN = "4:memory:/process_api/ba076f32b97379c419e263b5adb78dbe\n2:cpuacct:/\n1:cpu:/\n0::/\n"
# "No limit" as version 1 writes it, read on the development machine.
V1_NONE = "9223372036854771712\n"


def test_v2_without_limits_as_recorded(build: Any) -> None:
    # The top group of the H200 machine has no cpu.max and no memory.max at all.
    root = build(
        {
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/cgroup": V2_OWN,
            "/sys/fs/cgroup/process_api/8049a129217bd2388d62556b0478d60c/cpu.max": "max 100000\n",
            "/sys/fs/cgroup/process_api/8049a129217bd2388d62556b0478d60c/memory.max": "max\n",
        }
    )
    assert read_cgroup(Tree(root)) == Limits()


# File formats: Linux Documentation/admin-guide/cgroup-v2.rst ("$MAX $PERIOD", "max").
def test_v2_nested_the_smallest_on_the_way_up_counts(build: Any) -> None:
    top = "/sys/fs/cgroup/process_api"
    own = f"{top}/8049a129217bd2388d62556b0478d60c"
    root = build(
        {
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/cgroup": V2_OWN,
            f"{own}/cpu.max": "400000 100000\n",
            f"{own}/memory.max": f"{8 * GIB}\n",
            f"{own}/memory.current": f"{GIB}\n",
            f"{top}/cpu.max": "150000 100000\n",
            f"{top}/memory.max": f"{16 * GIB}\n",
            f"{top}/memory.current": f"{14 * GIB}\n",
        }
    )
    found = read_cgroup(Tree(root))
    assert found.cpus == 1.5
    assert found.memory == 8 * GIB
    # Our own group has 7 GiB left, its parent 2 GiB: 2 GiB is what we can get.
    assert found.memory is not None and found.memory_used is not None
    assert found.memory - found.memory_used == 2 * GIB
    cpu = snapshot(root).cpu
    assert cpu.quota == 1.5 and cpu.usable == 1


def test_file_cache_that_can_be_dropped_is_not_used_memory(build: Any) -> None:
    root = build(
        {
            "/proc/self/mountinfo": V2_MOUNT,
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
            "/sys/fs/cgroup/memory.current": f"{4 * GIB}\n",
            "/sys/fs/cgroup/memory.stat": f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
        }
    )
    assert read_cgroup(Tree(root)) == Limits(None, 4 * GIB, 2 * GIB)


def test_v1_as_recorded_has_no_limit(build: Any) -> None:
    root = build(
        {
            "/proc/self/mountinfo": V1_MOUNTS,
            "/proc/self/cgroup": V1_OWN,
            "/sys/fs/cgroup/memory/process_api/ba076f32b97379c419e263b5adb78dbe/memory.limit_in_bytes": V1_NONE,
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert read_cgroup(Tree(root)) == Limits()


def test_v1_limits(build: Any) -> None:
    root = build(
        {
            "/proc/self/mountinfo": V1_MOUNTS,
            "/proc/self/cgroup": V1_OWN,
            "/sys/fs/cgroup/memory/process_api/ba076f32b97379c419e263b5adb78dbe/memory.limit_in_bytes": V1_NONE,
            "/sys/fs/cgroup/memory/process_api/memory.limit_in_bytes": f"{2 * GIB}\n",
            "/sys/fs/cgroup/memory/process_api/memory.usage_in_bytes": f"{GIB}\n",
            "/sys/fs/cgroup/memory/process_api/memory.stat": "inactive_file 7\ntotal_inactive_file 1024\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        }
    )
    assert read_cgroup(Tree(root)) == Limits(2.5, 2 * GIB, GIB - 1024)


def test_v1_docker_without_a_cgroup_namespace(build: Any) -> None:
    """/proc/self/cgroup shows the host's path while the container's own group is mounted at the top.

    Format: proc_pid_mountinfo(5), field 4 is the root of the mount within the file system.
    """
    group = "/docker/0a1b"
    root = build(
        {
            "/proc/self/mountinfo": f"35 31 0:32 {group} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            "/proc/self/cgroup": f"4:memory:{group}\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
        }
    )
    assert read_cgroup(Tree(root)) == Limits(None, GIB, 4096)
    build(
        {
            "/proc/self/cgroup": f"4:memory:{group}/worker\n",
            "/sys/fs/cgroup/memory/worker/memory.limit_in_bytes": "8192\n",
            "/sys/fs/cgroup/memory/worker/memory.usage_in_bytes": "0\n",
        }
    )
    assert read_cgroup(Tree(root)) == Limits(None, 8192, 0)


def test_without_mountinfo_the_usual_places_are_read(build: Any) -> None:
    root = build({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert read_cgroup(Tree(root)).cpus == 0.5


@pytest.mark.parametrize(
    "text", ["", "max", "100000", "0 100000", "100000 0", "-5 100000", "nan 1", "1e5 100000", "x y"]
)
def test_a_quota_that_makes_no_sense_is_none(build: Any, text: str) -> None:
    root = build({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": text})
    assert read_cgroup(Tree(root)).cpus is None


def test_a_second_mount_elsewhere_does_not_hide_the_usual_one(build: Any) -> None:
    # Cilium mounts the tree at /run/cilium/cgroupv2 too (its documentation, "CGroup v2 mount").
    second = V2_MOUNT.replace("/sys/fs/cgroup", "/run/cilium/cgroupv2")
    root = build(
        {
            "/proc/self/mountinfo": V2_MOUNT + second,
            "/proc/self/cgroup": "0::/\n",
            "/sys/fs/cgroup/cpu.max": "200000 100000\n",
        }
    )
    assert read_cgroup(Tree(root)).cpus == 2
