"""Kronos's import path and command lines, where its document has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "compat"


def run(*arguments: str, folder: Path, path: tuple[Path, ...] = ()) -> Any:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *path))),
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def test_the_names_are_anytorchs_own(tmp_path: Path) -> None:
    code = (
        "import anytorch, model, model.device, model.kronos\n"
        "assert all(getattr(model, name) is getattr(anytorch, name) for name in model.__all__)\n"
        "assert model.device.resolve_device is anytorch.resolve_device\n"
        "assert all(getattr(model.kronos, name) is getattr(anytorch, name) for name in model.kronos.__all__)\n"
        "print(sorted(model.__all__))"
    )
    done = run("-c", code, folder=tmp_path, path=(COMPAT / "gitSource",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['Kronos', 'KronosPredictor', 'KronosTokenizer', 'resolve_device']"


def test_device_resolution_as_the_document_shows_it() -> None:
    done = run("test_device_resolution.py", folder=COMPAT / "services")
    assert done.returncode == 0, done.stderr
    for line in (
        "Testing Device Resolution",
        "✓ Device resolution module working correctly",
        "✓ CPU fallback logic implemented",
        "✓ CUDA availability detection working",
    ):
        assert line in done.stdout.splitlines()


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_training_scripts(processes: int, tmp_path: Path) -> None:
    """`python gitSource/finetune/train_tokenizer.py --device cpu`, and with two processes of torchrun; then the predictor.

    As typed in the document, but for the number of steps.
    """
    short = ["--steps-per-epoch", "2", "--validation-windows", "8", "--batch-size", "4"]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if processes == 2 else []
    kinds = ("tokenizer", "predictor") if processes == 1 else ("tokenizer",)
    for kind in kinds:
        script = str(COMPAT / "gitSource" / "finetune" / f"train_{kind}.py")
        done = run(*start, script, "--device", "cpu", *short, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "outputs" / "models" / f"finetune_{kind}_demo" / "checkpoints"
        assert (folder / "best_model" / "model.safetensors").is_file()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == 2 and summary["processes"] == processes
        assert done.stdout.count("best weights") == 1, "of several processes one speaks"
