"""A compiler that came by pip: found after the system's own, and as good for the kernels that no wheel can carry."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from anytorch import native, settings
from anytorch.errors import CompilerMissing
from anytorch.native import compiler as compilers

ZIG = Path(__file__).resolve().parents[2] / ".cache" / "zig" / "ziglang" / "zig"
KERNEL = """
#include "lanes.h"
extern "C" __attribute__((visibility("default"))) int width() { return W; }
extern "C" __attribute__((visibility("default"))) float root(float x) { return std::sqrt(x) + std::exp(0.0f); }
"""


@pytest.fixture
def zig(missing: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package ziglang is installed, and nothing else compiles."""
    program = Path(os.environ.get("ANYTORCH_ZIG", ZIG))
    if not program.is_file():
        missing("zig", "run `make zig`")
    monkeypatch.setenv("PATH", "/nothing/here")
    monkeypatch.setattr(compilers, "packaged_zig", lambda: program)
    return program


def test_it_comes_after_the_systems_own(zig: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compilers.find_compiler()
    assert found.command[:2] == (str(zig), "c++") and found.is_packaged
    (tmp_path / "clang++").write_text("#!/bin/sh\n")
    (tmp_path / "clang++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    own = compilers.find_compiler()
    assert own.command == (str(tmp_path / "clang++"),) and not own.is_packaged


def test_without_the_package_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nothing/here")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(CompilerMissing, match="ziglang") as raised:
        compilers.find_compiler()
    assert "anytorch[compiler]" in raised.value.hint


def test_the_package_is_found_by_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert compilers.packaged_zig() is None, "a package without its program"
    (tmp_path / "ziglang" / "zig").touch()
    assert compilers.packaged_zig() == tmp_path / "ziglang" / "zig"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="what a kernel needs of the C library is found by Linux' loader")
def test_a_kernel_is_compiled_for_the_level_that_is_asked_for(zig: Path, tmp_path: Path) -> None:
    """zig itself would use all that this processor has. And it does not compile a C++ library first, for minutes."""
    source = tmp_path / "kernel.cpp"
    source.write_text(KERNEL)
    widths = {}
    for name in native.supported():
        widths[name] = native.load("kernel", [source], level=name, header="lanes.h").width() * 4
    assert widths == {name: native.LEVELS[name].width for name in native.supported()}
    root = native.load("kernel", [source], level="baseline", header="lanes.h").root
    import ctypes

    root.argtypes, root.restype = [ctypes.c_float], ctypes.c_float
    assert root(9.0) == 4.0
    assert not list((settings.cache_folder() / "zig").rglob("libc++.a"))


def test_named_by_a_setting_it_keeps_to_the_level_too(zig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_CXX", f"{zig} c++")
    found = compilers.find_compiler()
    assert found.is_zig and found.command == (str(zig), "c++", "-mcpu=baseline")
