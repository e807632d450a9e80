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
    if processes == 1:
        from anytorch import load_predictor

        assert load_predictor(folder / "best_model", device="cpu").max_context == 128, "it says what it goes with"


class Settings:
    """Kronos's `Config`, as far as the command line reads it."""

    training_device, save_path, dataset_path = "auto", "out", "nowhere"
    tokenizer_save_folder_name, predictor_save_folder_name = "t", "p"
    pretrained_tokenizer_path = pretrained_predictor_path = "tiny"
    finetuned_tokenizer_path = "out/t/checkpoints/best_model"
    lookback_window, predict_window, epochs, batch_size, n_train_iter = 90, 10, 30, 50, 2000
    tokenizer_learning_rate, predictor_learning_rate, adam_weight_decay = 2e-4, 4e-5, 0.1
    accumulation_steps, seed = 1, 100


def test_settings_become_a_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.cli.kronos_scripts import command_line

    monkeypatch.chdir(tmp_path)

    def last(words: list[str], flag: str) -> str:
        return words[len(words) - 1 - words[::-1].index(flag) + 1]

    shown = command_line(Settings(), "predictor", ["--device", "cpu"])
    assert shown[:3] == ["finetune", "predictor", "--sample"]  # there is no data: a short run on generated candles
    assert last(shown, "--epochs") == "1" and last(shown, "--device") == "cpu"
    assert last(shown, "--tokenizer") == "tiny" and last(shown, "--learning-rate") == "4e-05"
    (tmp_path / "nowhere").mkdir()
    (tmp_path / Settings.finetuned_tokenizer_path).mkdir(parents=True)
    real = command_line(Settings(), "predictor", [])
    assert last(real, "--data") == "nowhere" and last(real, "--epochs") == "30" and last(real, "--batch-size") == "50"
    assert last(real, "--tokenizer") == Settings.finetuned_tokenizer_path  # the one that was trained before
    assert last(command_line(Settings(), "tokenizer", []), "--tokenizer") == "tiny"
    named = command_line(Settings(), "tokenizer", ["--data", "mine.csv"])
    assert "--sample" not in named and "--epochs" not in named and last(named, "--output") == "out/t/checkpoints"
