"""Document 4's import path and its two programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMPAT = Path(__file__).resolve().parents[2] / "compat"
SOURCES = COMPAT / "src"


def test_every_name_is_lites_own(run_script: Callable[..., dict[str, Any]]) -> None:
    told = run_script(
        """
        import sys
        import pytorch_custom_backend as theirs
        from anytorch import lite
        answer(same=all(getattr(theirs, n) is getattr(lite, n) for n in theirs.__all__), names=theirs.__all__,
               torch="torch" in sys.modules)
        """,
        None,
        path=[SOURCES],
    )
    names = [
        "AutogradTensor",
        "CustomAdam",
        "CustomConv2d",
        "CustomDevice",
        "CustomLinear",
        "CustomMSELoss",
        "CustomTensor",
    ]
    assert told == {"same": True, "names": names, "torch": False}


def test_the_classes_of_its_extensions_train() -> None:
    from anytorch.lite import AutogradTensor, CustomAdam

    w = AutogradTensor([3.0, -2.0], requires_grad=True)
    optimizer = CustomAdam([w], lr=0.1)
    assert optimizer.m == {} and w.grad is None and w.grad_fn is None
    for _ in range(200):
        loss = (w * w).sum()
        assert loss.grad_fn is not None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(w.data).max() < 0.1 and set(optimizer.m) == set(optimizer.v) == {0}
    assert not AutogradTensor([1.0]).requires_grad


def run(program: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_trying_the_installation(tmp_path: Path) -> None:
    said = run(SOURCES / "pytorch_custom_backend.py", tmp_path)
    assert "Using device: custom_gpu:0" in said
    assert "Matrix multiplication: (3, 4) @ (4, 2) = (3, 2)" in said


@pytest.mark.long
def test_the_demo_draws_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said = run(SOURCES / "pytorch_custom_demo.py", tmp_path)
    assert "500x500: custom" in said
    assert (tmp_path / "pytorch_custom_demo.png").read_bytes().startswith(b"\x89PNG")
