"""The test commands that the documents name, run as they name them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "compat/src")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=ROOT / "compat", timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_device_resolution() -> None:
    text = run("services/test_device_resolution.py")
    assert "Device resolution module working correctly" in text
    assert "cpu      -> cpu" in text


def test_multi_backend() -> None:
    assert "backward" in run("tests/test_multi_backend.py", "cpu")


def test_every_available_back_end() -> None:
    text = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "src/ai_os_diffusion/tests/test_device_backends.py")
    assert "1 passed" in text or "2 passed" in text
