"""Macs: processor, memory and the GPU every arm64 Mac has, by sysctl."""

from __future__ import annotations

import re
from collections.abc import Callable

from anytorch.probe.facts import Cpu, Gpu, Memory
from anytorch.probe.tree import Tree, whole

Sysctl = Callable[[str], str | None]  # the value as `sysctl -n NAME` prints it; None: no such name

SYSTEM_VERSION = "/System/Library/CoreServices/SystemVersion.plist"
# sysctl's names for instructions, and what /proc/cpuinfo calls the same
ARM_FEATURES = {
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.neon": "asimd",
}


def system_sysctl() -> Sysctl:
    """Ask the running kernel (sysctlbyname of libSystem)."""
    import ctypes

    ask = ctypes.CDLL(None).sysctlbyname

    def value(name: str) -> str | None:
        size = ctypes.c_size_t(0)
        # int sysctlbyname(const char* name, void* old, size_t* old_length, void* new, size_t new_length)
        if ask(name.encode(), None, ctypes.byref(size), None, 0) != 0 or not 0 < size.value <= 65_536:
            return None
        buffer = ctypes.create_string_buffer(size.value)
        if ask(name.encode(), buffer, ctypes.byref(size), None, 0) != 0:
            return None
        data = buffer.raw[: size.value]
        # Numbers come as 4 or 8 bytes, text with a zero byte at its end; every text we ask for is longer than 8.
        if len(data) in (4, 8):
            return str(int.from_bytes(data, "little", signed=True))
        return data.rstrip(b"\0").decode("utf-8", "replace")

    return value


def read_macos(tree: Tree) -> str | None:
    """ "14.5", from the property list every Mac has; reading it as text is 20 times cheaper than plistlib."""
    text = tree.text(SYSTEM_VERSION) or ""
    match = re.search(r"<key>ProductVersion</key>\s*<string>([\d.]+)</string>", text)
    return match.group(1)[:50] if match else None


def is_rosetta(sysctl: Sysctl) -> bool:
    return sysctl("sysctl.proc_translated") == "1"


def read_mac_cpu(sysctl: Sysctl) -> Cpu:
    performance = whole(sysctl("hw.perflevel0.physicalcpu"), high=4096)
    efficiency = whole(sysctl("hw.perflevel1.physicalcpu"), high=4096)
    words = f"{sysctl('machdep.cpu.features') or ''} {sysctl('machdep.cpu.leaf7_features') or ''}"
    features = {name for key, name in ARM_FEATURES.items() if sysctl(key) == "1"}
    brand = sysctl("machdep.cpu.brand_string")
    hybrid = bool(performance and efficiency)
    return Cpu(
        model=brand,
        vendor=sysctl("machdep.cpu.vendor") or ("Apple" if (brand or "").startswith("Apple") else None),
        logical=whole(sysctl("hw.logicalcpu"), high=4096) or 1,
        physical=whole(sysctl("hw.physicalcpu"), high=4096),
        affinity=None,  # macOS has none
        quota=None,
        performance_cores=performance if hybrid else None,
        efficiency_cores=efficiency if hybrid else None,
        features=frozenset(features | set(words.lower().split())),
    )


def read_mac_memory(sysctl: Sysctl) -> Memory:
    """kern.memorystatus_level is the share of memory, in percent, that is free or can be freed at once."""
    total = whole(sysctl("hw.memsize"))
    level = whole(sysctl("kern.memorystatus_level"), high=100)
    available = total * level // 100 if total is not None and level is not None else None
    return Memory(total, available, None, None)


def read_apple_gpu(sysctl: Sysctl, arch: str) -> list[Gpu]:
    """An arm64 Mac always has a GPU that Metal drives, also when this Python is translated and so cannot use it."""
    if arch != "arm64" and not is_rosetta(sysctl):
        return []
    return [
        Gpu(
            vendor="apple",
            name=sysctl("machdep.cpu.brand_string"),
            index=0,
            integrated=True,
            total=whole(sysctl("hw.memsize")),
            unified=True,
            sources=("sysctl",),
        )
    ]
