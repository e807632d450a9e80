"""Libraries that are called by ctypes, as small C stubs: Level Zero, and an NVML that never answers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.faulty_disk import failing_threads

from anytorch.probe import snapshot
from anytorch.probe.cards import read_level_zero
from anytorch.probe.nvidia import read_nvml


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory, missing: Callable[[str, str], NoReturn]) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        missing("compiler", "gcc is not installed")
    library = tmp_path_factory.mktemp("stubs") / "libstubs.so"
    source = Path(__file__).with_name("stubs.c")
    subprocess.run([compiler, "-fPIC", "-shared", "-Wall", "-Werror", "-o", library, source], check=True)
    return str(library)


def test_level_zero_counts_the_devices_of_every_driver(stubs: str, build: Any) -> None:
    assert read_level_zero(stubs) == (0, 3)
    graphics = snapshot(build({"/dev/": ""}), {"ANYTORCH_LEVEL_ZERO_LIBRARY": stubs}).graphics
    assert (graphics.level_zero_code, graphics.level_zero_devices) == (0, 3)


def test_level_zero_that_fails_gives_its_code(stubs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVEL_ZERO_STUB_CODE", "0x78000001")
    assert read_level_zero(stubs) == (0x78000001, None)


def test_no_level_zero() -> None:
    assert read_level_zero("/nowhere.so") == (None, None)
    assert read_level_zero("libm.so.6") == (None, None)


def test_an_nvml_that_hangs_is_left_behind(stubs: str) -> None:
    report = read_nvml(stubs, timeout_s=0.1)
    assert report.code is None and "did not answer within 0.1 s" in (report.error or "")


def test_a_system_without_another_thread_asks_no_library() -> None:
    with failing_threads(1):
        report = read_nvml("libnvidia-ml.so.1")
    assert "was not queried: can't start new thread" in str(report)
