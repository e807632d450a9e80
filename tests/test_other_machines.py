"""tools/other_machines.py: what stands for which machine. (CI runs it for the CPUs.)"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import module_at

TOOL = Path(__file__).resolve().parents[1] / "tools" / "other_machines.py"


@pytest.fixture(scope="module")
def tool() -> Any:
    return module_at(TOOL)


def test_the_numeric_tests_exist(tool: Any) -> None:
    assert [path for path in tool.NUMERIC if not (tool.ROOT / path.removeprefix("--ignore=")).exists()] == []


def test_only_what_numpy_has_is_switched_off(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, expected in (
        ({"X86_V3", "X86_V4", "AVX512_ICL"}, "AVX512_ICL X86_V4"),
        ({"AVX2", "FMA3", "AVX512F", "AVX512_SKX"}, "AVX512F AVX512_SKX"),  # NumPy 1.26's names
        ({"X86_V3"}, None),
    ):
        monkeypatch.setattr(tool, "numpy_features_on", lambda here=here: here)
        assert tool.environment(tool.MACHINES["haswell"]).get("NPY_DISABLE_CPU_FEATURES") == expected


def test_a_cpu_that_cannot_stand_in_is_left_out(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(tool, "features", lambda: frozenset({"avx2", "fma", "f16c"}))
    left_out = {name for name in tool.CPUS if tool.cannot_stand_in(tool.MACHINES[name])}
    assert left_out == {"skylakex"}
    monkeypatch.setattr(tool.platform, "machine", lambda: "aarch64")
    assert all(tool.cannot_stand_in(tool.MACHINES[name]) for name in tool.CPUS)
    assert tool.cannot_stand_in(tool.MACHINES["german"]) is None


@pytest.mark.long
def test_the_switches_reach_the_libraries(tool: Any, run_python: Any) -> None:
    """Each library says which code it has chosen."""
    torch = pytest.importorskip("torch")
    if tool.cannot_stand_in(tool.MACHINES["haswell"]):
        pytest.skip("this CPU has no AVX2")
    code = """
import numpy, torch
from numpy._core._multiarray_umath import __cpu_features__ as have
from anytorch import native
print(torch.backends.cpu.get_cpu_capability(), any(have.get(n) for n in ("AVX512_SKX", "X86_V4")), native.level().name)
"""
    for name, expected in (("haswell", "AVX2 False avx2"), ("oldest", "DEFAULT False baseline")):
        done = run_python(code, env=tool.environment(tool.MACHINES[name]))
        assert done.stdout.split("\n")[0] == expected, (torch.__version__, done.stderr)


def test_a_name_that_does_not_exist() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--only", "hasswell"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2 and "unknown machine 'hasswell'; there are oldest, haswell" in done.stderr
