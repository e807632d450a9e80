"""The programs in examples/ run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"


def run(name: str, *arguments: str, limit: int | None = None) -> Any:
    """Run an example as its text says; `limit` bounds its address space in bytes."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    if limit is not None:
        bounded = "import resource, runpy, sys; import torch; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0})); "
        code = bounded.format(limit) + f"sys.argv = {command[1:]!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"choose_device.py", "explain.py", "fit_batch.py"}


def test_choose_device() -> None:
    done = run("choose_device.py")
    assert done.stdout.startswith("asked for auto, using ") and "output (4, 8)" in done.stdout


def test_choose_device_that_is_missing() -> None:
    done = run("choose_device.py", "npu:0")
    assert "'npu:0' was asked for and cannot be used" in done.stdout
    assert "using cpu" in done.stdout and done.stderr == ""


def test_explain() -> None:
    done = run("explain.py")
    assert done.stdout.startswith("asked for: auto\nchosen: ")
    assert "seen, not tried" in done.stdout


def test_fit_batch() -> None:
    assert "batch 4096 fits on " in run("fit_batch.py").stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is bounded with Linux's RLIMIT_AS")
def test_fit_batch_halves_on_a_real_error() -> None:
    """2**23 rows of 1 KiB need 8 GiB, twice; in 3 GiB of address space the allocator itself refuses."""
    done = run("fit_batch.py", str(2**23), limit=3 << 30)
    assert f"did not fit: {2**23}, {2**22}" in done.stdout
    batch = int(done.stdout.split("batch ")[1].split()[0])
    assert batch < 2**22 and batch & (batch - 1) == 0
