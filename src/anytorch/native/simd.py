"""SIMD levels: which instructions a build may use, and which of the levels this processor can run.

One library is built per level, and only for the level in use: the choice is made at run time, and a cache folder
shared by different machines keeps their builds apart.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from anytorch import settings
from anytorch.errors import UsageError
from anytorch.probe.apple import read_mac_cpu, system_sysctl
from anytorch.probe.cpu import read_cpu
from anytorch.probe.tree import Tree

_X86 = ("x86_64", "amd64")


@dataclass(frozen=True)
class Level:
    """`features` as /proc/cpuinfo names them: all of them must be there. `width` is the vector width in bytes."""

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]
    width: int


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_AVX2_FEATURES = frozenset({"avx2", "fma", "f16c"})
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

# Best last. "baseline" is what every processor of the architecture has: SSE2 on x86-64, NEON on arm64.
LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level("baseline", (), frozenset(), 16),
        Level("avx2", _AVX2, _AVX2_FEATURES, 32),
        Level("avx2vnni", (*_AVX2, "-mavxvnni"), _AVX2_FEATURES | {"avx_vnni"}, 32),
        Level("avx512", _AVX512, _AVX512_FEATURES, 64),
        Level("avx512vnni", (*_AVX512, "-mavx512vnni"), _AVX512_FEATURES | {"avx512_vnni"}, 64),
    )
}


def features() -> frozenset[str]:
    """The processor's features as the operating system allows them; empty where it does not say (Windows)."""
    system = platform.system()
    if system == "Linux":
        return read_cpu(Tree()).features
    if system == "Darwin":
        return read_mac_cpu(system_sysctl()).features
    return frozenset()


def supported(found: frozenset[str] | None = None, machine: str | None = None) -> tuple[str, ...]:
    """The names of the levels this processor can run, best last. `baseline` is always among them."""
    if (machine or platform.machine()).lower() not in _X86:
        return ("baseline",)
    found = features() if found is None else found
    return tuple(name for name, level in LEVELS.items() if level.features <= found)


def level(name: str | None = None) -> Level:
    """The level to build for: the one named, else the setting `simd`, else the best this processor can run."""
    name = name or settings.get("simd")
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
