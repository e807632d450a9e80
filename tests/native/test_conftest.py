"""The test set-up itself: a leak is caught, settings stay apart, a required device that is missing fails, one build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

INNER = """
import os
from anytorch import settings

def test_leaks():
    os.environ["SOME_VARIABLE"] = "left behind"

def test_overrides_a_setting():
    settings.override("backend", "cuda")

def test_sees_no_setting_of_anybody_else(tmp_path):
    assert settings.lookup("backend") == settings.Value("auto", "default")
    assert settings.settings_file().parent == settings.cache_folder().parent == tmp_path

def test_needs_a_device(missing):
    missing("webgpu-adapter", "wgpu found none")
"""


def outcomes(folder: Path, require: str) -> dict[str, str]:
    shutil.copy(TESTS / "conftest.py", folder)
    shutil.copytree(TESTS / "native", folder / "native", ignore=shutil.ignore_patterns("test_*", "__pycache__"))
    (folder / "test_inner.py").write_text(INNER)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -rA -p no:cacheprovider --import-mode=importlib\n")
    env = {**os.environ, "ANYTORCH_TEST_REQUIRE": require, "ANYTORCH_BACKEND": "xpu", "KRONOS_DEVICE": "mps"}
    env["PYTHONPATH"] = str(TESTS.parent / "src")
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they import for seconds, and none of them is asked
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(folder)], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    found: dict[str, str] = {}
    for outcome, rest in (line for line in lines if len(line) == 2):
        for name in ("leaks", "overrides", "sees_no_setting", "needs_a_device"):
            if outcome in ("PASSED", "FAILED", "ERROR") and f"test_{name}" in rest:
                found[name] = outcome
        if outcome == "SKIPPED":
            found["needs_a_device"] = outcome
    assert found, done.stdout + done.stderr
    return found


def test_leaks_settings_and_missing_devices(tmp_path: Path) -> None:
    (tmp_path / "lenient").mkdir()
    (tmp_path / "strict").mkdir()
    lenient = outcomes(tmp_path / "lenient", "cpu")
    assert lenient == {
        "leaks": "ERROR",
        "overrides": "PASSED",
        "sees_no_setting": "PASSED",
        "needs_a_device": "SKIPPED",
    }
    strict = outcomes(tmp_path / "strict", "cpu, webgpu-adapter")
    assert strict == {**lenient, "needs_a_device": "FAILED"}


def test_processes_that_ask_at_once_compile_once(tmp_path: Path, run_python: Any) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho called >> "{tmp_path}/calls"\nsleep 0.3\ncp "$1" "$3"\n')
    compiler.chmod(0o755)
    (tmp_path / "source.c").write_text("int main(void) { return 0; }\n")
    code = f"""
import sys
sys.path.insert(0, {str(TESTS / "native")!r})
from pathlib import Path
import hardware
hardware.BUILDS = Path({str(tmp_path / "builds")!r})
print(hardware.build(Path({str(tmp_path / "source.c")!r}), "made", [{str(compiler)!r}]).read_text())
"""
    asked = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = [process.communicate(timeout=300)[0].strip() for process in asked]
    assert answers == ["int main(void) { return 0; }"] * 4
    assert (tmp_path / "calls").read_text().split() == ["called"]
