"""The processor: its name, cores, the instructions it has and how much of it this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from anytorch.probe.facts import Cpu
from anytorch.probe.tree import LARGE, SMALL, Tree, cpu_list, fields, whole

# MIDR_EL1 implementer codes, as in Linux' arch/arm64/include/asm/cputype.h
ARM_VENDORS = {
    0x41: "ARM", 0x42: "Broadcom", 0x43: "Cavium", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA",
    0x50: "APM", 0x51: "Qualcomm", 0x61: "Apple", 0x6D: "Microsoft", 0xC0: "Ampere",
}  # fmt: skip
ARM_PARTS = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD49): "Neoverse-N2", (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD8E): "Neoverse-N3", (0x46, 0x001): "A64FX", (0x48, 0xD01): "TSV110 (Kunpeng 920)",
}  # fmt: skip
CPUS = "/sys/devices/system/cpu"


def read_cpu(tree: Tree, *, quota: float | None = None) -> Cpu:
    """The CPU of a Linux machine. `quota` is the control group's limit in cores."""
    # Only the first processor counts, but ARM puts some lines last.
    first = fields(tree.text("/proc/cpuinfo", SMALL))
    online = cpu_list(tree.text(f"{CPUS}/online"))
    siblings = _sibling_sets(tree, online)
    blocks: list[dict[str, str]] = []
    if not online or siblings is None:
        blocks = _blocks(tree.text("/proc/cpuinfo", LARGE) or "")
    logical = len(online) or len(blocks) or (os.cpu_count() if tree.real else None) or 1
    physical = len(siblings) if siblings is not None else _physical_from(blocks)
    performance, efficiency = _hybrid(tree, online, siblings)
    implementer = whole(first.get("CPU implementer"), 16)
    part = whole(first.get("CPU part"), 16)
    model = first.get("model name") or first.get("Processor") or first.get("cpu model") or first.get("uarch")
    if model is None and implementer is not None and part is not None:
        model = ARM_PARTS.get((implementer, part))
    vendor = first.get("vendor_id") or (ARM_VENDORS.get(implementer) if implementer is not None else None)
    flags = first.get("flags") or first.get("Features") or first.get("features") or ""
    return Cpu(
        model=(model or first.get("cpu") or "").strip()[:200] or None,
        vendor=(vendor or "").strip()[:100] or None,
        logical=logical,
        physical=physical,
        affinity=_affinity(tree),
        quota=quota,
        performance_cores=performance,
        efficiency_cores=efficiency,
        features=frozenset(flags.lower().split()),
    )


def _blocks(text: str) -> list[dict[str, str]]:
    found = [fields(block) for block in text.split("\n\n")]
    return [block for block in found if "processor" in block]


def _physical_from(blocks: Iterable[Mapping[str, str]]) -> int | None:
    """Physical cores from /proc/cpuinfo alone (no /sys in some sandboxes): distinct (package, core)."""
    cores = {(b["physical id"], b["core id"]) for b in blocks if "physical id" in b and "core id" in b}
    return len(cores) or None


def _sibling_sets(tree: Tree, online: frozenset[int]) -> list[frozenset[int]] | None:
    """One set of logical CPUs per physical core, or None where the kernel does not tell.

    Reads one small file per core, not per thread: siblings are skipped once their core is known.
    """
    cores: list[frozenset[int]] = []
    placed: set[int] = set()
    for cpu in sorted(online):
        if cpu in placed:
            continue
        # thread_siblings_list is the older name of core_cpus_list.
        for name in ("core_cpus_list", "thread_siblings_list"):
            core = cpu_list(tree.text(f"{CPUS}/cpu{cpu}/topology/{name}"))
            if cpu in core:
                break
        else:
            return None
        cores.append(core)
        placed |= core
    return cores or None


def _hybrid(tree: Tree, online: frozenset[int], siblings: list[frozenset[int]] | None) -> tuple[int | None, int | None]:
    """Physical (performance, efficiency) cores of a hybrid CPU, (None, None) of an ordinary one."""
    if siblings is None:
        return None, None
    fast = cpu_list(tree.text("/sys/devices/cpu_core/cpus"))
    slow = cpu_list(tree.text("/sys/devices/cpu_atom/cpus")) | cpu_list(tree.text("/sys/devices/cpu_lowpower/cpus"))
    if not (fast and slow) and tree.exists(f"{CPUS}/cpu{min(online)}/cpu_capacity"):
        # ARM big.LITTLE: the kernel gives each core a capacity up to 1024; the smallest kind saves power.
        capacity = {cpu: tree.number(f"{CPUS}/cpu{cpu}/cpu_capacity") or 0 for cpu in online}
        least = min(capacity.values())
        slow = frozenset(cpu for cpu, value in capacity.items() if value == least)
        fast = online - slow
    performance = sum(1 for core in siblings if core & fast)
    efficiency = sum(1 for core in siblings if core & slow)
    return (performance, efficiency) if performance and efficiency else (None, None)


def _affinity(tree: Tree) -> int | None:
    if tree.real and hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or None
    for line in (tree.text("/proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return len(cpu_list(line.partition(":")[2])) or None
    return None
