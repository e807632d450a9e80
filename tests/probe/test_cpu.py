from __future__ import annotations

from typing import Any

import pytest

from anytorch.probe import snapshot
from anytorch.probe.tree import cpu_list, whole

CPUS = "/sys/devices/system/cpu"

# The development machine, 2026-11-15 (flags shortened; its two processors differ only in the numbers).
EPYC = """processor	: 0
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC
physical id	: 0
siblings	: 2
core id		: 0
cpu cores	: 2
flags		: fpu sse2 lm avx avx2 avx512f avx512_bf16 avx512_vnni
power management:

processor	: 1
vendor_id	: AuthenticAMD
cpu family	: 25
model		: 17
model name	: AMD EPYC
physical id	: 0
siblings	: 2
core id		: 1
cpu cores	: 2
flags		: fpu sse2 lm avx avx2 avx512f avx512_bf16 avx512_vnni
power management:

"""

# An Ampere machine, verbatim from archspec/archspec-json issue 41 (its first two processors).
NEOVERSE = """processor	: 0
BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1

processor	: 1
BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1

"""


def test_amd_epyc_with_and_without_sysfs(build: Any) -> None:
    root = build({"/proc/cpuinfo": EPYC, "/proc/self/status": "Name:\tcat\nCpus_allowed_list:\t0-1\n"})
    cpu = snapshot(root).cpu
    assert (cpu.model, cpu.vendor, cpu.logical, cpu.physical, cpu.affinity) == ("AMD EPYC", "AuthenticAMD", 2, 2, 2)
    assert {"avx2", "avx512_bf16"} <= cpu.features
    assert not cpu.hybrid and cpu.good_threads == 2
    assert snapshot(root).machine.arch == "x86_64"
    build({f"{CPUS}/online": "0-1\n", f"{CPUS}/cpu0/topology/core_cpus_list": "0\n"})
    build({f"{CPUS}/cpu1/topology/core_cpus_list": "1\n"})
    assert snapshot(root).cpu == cpu


def test_arm_server(build: Any) -> None:
    hardware = snapshot(build({"/proc/cpuinfo": NEOVERSE}))
    cpu = hardware.cpu
    assert (cpu.model, cpu.vendor, cpu.logical, cpu.physical) == ("Neoverse-N1", "ARM", 2, None)
    assert "asimddp" in cpu.features
    assert hardware.machine.arch == "aarch64"


def test_hybrid_i9_counts_performance_cores_without_their_threads(build: Any) -> None:
    # i9-13900K: 32 logical CPUs, 24 cores, 8 of them with two threads (lexi-src/sGPUpt issue 1, lscpu). The kernel
    # numbers the performance threads 0-15 in pairs and the efficiency cores 16-31.
    files = {
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: 13th Gen Intel(R) Core(TM) i9-13900K\n",
        f"{CPUS}/online": "0-31\n",
        "/sys/devices/cpu_core/cpus": "0-15\n",
        "/sys/devices/cpu_atom/cpus": "16-31\n",
    }
    for cpu in range(32):
        siblings = f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}" if cpu < 16 else str(cpu)
        files[f"{CPUS}/cpu{cpu}/topology/core_cpus_list"] = siblings + "\n"
    cpu_facts = snapshot(build(files)).cpu
    assert (cpu_facts.logical, cpu_facts.physical) == (32, 24)
    assert (cpu_facts.performance_cores, cpu_facts.efficiency_cores) == (8, 16)
    assert cpu_facts.hybrid and cpu_facts.good_threads == 8


def test_big_little_by_capacity(build: Any) -> None:
    # ARM's Juno board: two Cortex-A57 of capacity 1024, four Cortex-A53 of 446 (Linux
    # Documentation/devicetree/bindings/cpu/cpu-capacity.txt, example 1).
    files = {f"{CPUS}/online": "0-5\n"}
    for cpu in range(6):
        files[f"{CPUS}/cpu{cpu}/topology/core_cpus_list"] = f"{cpu}\n"
        files[f"{CPUS}/cpu{cpu}/cpu_capacity"] = "1024\n" if cpu < 2 else "446\n"
    facts = snapshot(build(files)).cpu
    assert (facts.performance_cores, facts.efficiency_cores) == (2, 4)


def test_meminfo_and_shm(build: Any) -> None:
    # The development machine and the H200 machine, 2026-11-15; the later of two mounts on /dev/shm is the one in use.
    root = build(
        {
            "/proc/meminfo": "MemTotal:       24684100 kB\nMemFree:        24406912 kB\nMemAvailable:   24363724 kB\n",
            "/proc/self/mountinfo": "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=131980916k\n"
            "31 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=134217728k\n",
        }
    )
    memory = snapshot(root).memory
    assert (memory.total, memory.available) == (24684100 * 1024, 24363724 * 1024)
    assert memory.shm == 134217728 * 1024
    assert memory.limit is None and memory.usable_available == memory.available


def test_old_kernels_have_no_mem_available(build: Any) -> None:
    text = "MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 10 kB\nCached: 1 kB\n"
    assert snapshot(build({"/proc/meminfo": text})).memory.available == 111 * 1024


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-3,8", {0, 1, 2, 3, 8}),
        ("", set()),
        (None, set()),
        ("5", {5}),
        ("3-1", set()),
        ("x,2", {2}),
        ("0-9999999", set()),
        ("0-2,1-3", {0, 1, 2}),
        ("-1", set()),
    ],
)
def test_cpu_list(text: str | None, expected: set[int]) -> None:
    assert cpu_list(text) == expected


def test_whole_never_returns_a_monster() -> None:
    assert whole("0x10", 16) == 16 and whole(" 7\n") == 7
    assert whole("f" * 60, 16) is None and whole("9" * 5000) is None and whole("-1") is None and whole(None) is None
