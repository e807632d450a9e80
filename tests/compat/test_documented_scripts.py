"""The test commands that the documents name, run as they name them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("tried")  # the trial itself is tests/devices/test_try_out.py


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


@pytest.mark.long
def test_npu_integration() -> None:
    """All six checks that the document lists, on the accelerator that is there."""
    text = run("training/test_npu_integration.py")
    assert [line[:4] for line in text.splitlines()] == [f"{n}. ✅" for n in range(1, 7)]


@pytest.mark.long
def test_training_with_the_mode_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_VIRTUAL_BLACKWELL", "1")
    monkeypatch.setenv("VB_MODE", "balanced")
    text = run("training/train.py")
    assert "mode on: True" in text and "Epoch 10: Loss = " in text


def test_every_available_back_end() -> None:
    text = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "src/ai_os_diffusion/tests/test_device_backends.py")
    assert "1 passed" in text or "2 passed" in text
