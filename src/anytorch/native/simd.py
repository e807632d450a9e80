"""SIMD levels: which instructions a build may use, and which of the levels this processor can run.

One library is built per level, and only for the level in use: the choice is made at run time, and a cache folder
shared by different machines keeps their builds apart.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from anytorch import logs, settings
from anytorch.errors import NativeUnavailable, UsageError
from anytorch.probe.apple import read_mac_cpu, system_sysctl
from anytorch.probe.cpu import read_cpu
from anytorch.probe.tree import Tree

log = logs.logger(__name__)

X86, ARM = ("x86_64", "amd64"), ("aarch64", "arm64")  # as platform.machine() says, in small letters


@dataclass(frozen=True)
class Level:
    """`features` as /proc/cpuinfo names them: all of them must be there. `width` is the vector width in bytes."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]
    width: int
    machines: tuple[str, ...] = X86


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_AVX2_FEATURES = frozenset({"avx2", "fma", "f16c"})
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

# Best last. "baseline" is what every processor of the architecture has: SSE2 on x86-64, NEON on arm64.
LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("baseline", (), frozenset(), 16, (*X86, *ARM)),
        Level("avx2", _AVX2, _AVX2_FEATURES, 32),
        Level("avx2vnni", (*_AVX2, "-mavxvnni"), _AVX2_FEATURES | {"avx_vnni"}, 32),
        Level("avx512", _AVX512, _AVX512_FEATURES, 64),
        Level("avx512vnni", (*_AVX512, "-mavx512vnni"), _AVX512_FEATURES | {"avx512_vnni"}, 64),
        Level("dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimddp"}), 16, ARM),
        Level("i8mm", ("-march=armv8.2-a+dotprod+i8mm",), frozenset({"asimddp", "i8mm"}), 16, ARM),
    )
}

# Loads code/processor.cpp; `library`, which asks this module for levels, sets it.
processor: Callable[[], ctypes.CDLL] | None = None
# What it asks for, in the order of its bits.
ASKED = ("fma", "f16c", "avx2", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni")


def features() -> frozenset[str]:
    """The processor's features as the operating system allows them; empty where unknown (Windows on arm64)."""
    system = platform.system()
    if system == "Linux":
        return read_cpu(Tree()).features
    if system == "Darwin":
        return read_mac_cpu(system_sysctl()).features
    return asked() if platform.machine().lower() in X86 else frozenset()


@lru_cache(maxsize=1)
def asked() -> frozenset[str]:
    """The features of an x86-64 processor by its own instruction, CPUID, for systems that have no list of them.

    Empty if that library is neither carried nor can be compiled: then the baseline is all there is.
    """
    if processor is None:
        return frozenset()
    try:
        bits = processor().processor_features
    except NativeUnavailable as exc:
        log.info("the processor's features are unknown, so our C++ is compiled for the baseline: %s", exc)
        return frozenset()
    bits.argtypes, bits.restype = [], ctypes.c_uint32
    found = int(bits())
    return frozenset(name for bit, name in enumerate(ASKED) if found >> bit & 1)


def levels_of(machine: str) -> tuple[str, ...]:
    """The names of all levels of an architecture, best last: ("baseline", "dotprod", "i8mm") of "aarch64"."""
    found = tuple(name for name, level in LEVELS.items() if machine.lower() in level.machines)
    return found or ("baseline",)


def supported(found: frozenset[str] | None = None, machine: str | None = None) -> tuple[str, ...]:
    """The names of the levels this processor can run, best last. `baseline` is always among them."""
    names = levels_of(machine or platform.machine())
    if len(names) > 1 and found is None:
        found = features()
    return tuple(name for name in names if LEVELS[name].features <= (found or frozenset()))


def level(name: str | None = None) -> Level:
    """The level to build for: the one named, else the setting `simd`, else the best this processor can run."""
    name = name or settings.get("simd")
    if name == "baseline":  # every processor runs it; and nothing more may be asked before `asked` has an answer
        return LEVELS[name]
    able = supported()
    if name is None:
        return LEVELS[able[-1]]
    if name not in LEVELS:
        raise UsageError(f"unknown SIMD level {name!r}; levels: {', '.join(LEVELS)}")
    if name not in able:
        raise UsageError(
            f"this processor cannot run code of SIMD level {name!r}; it can run {', '.join(able)}",
            hint="unset ANYTORCH_SIMD to take the best one",
        )
    return LEVELS[name]
