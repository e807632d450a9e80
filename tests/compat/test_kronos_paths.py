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
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", COMPAT / "src", *path))),
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
        "names = ['Kronos', 'KronosPredictor', 'KronosTokenizer']\n"
        "assert all(getattr(model, name) is getattr(anytorch, name) for name in names)\n"
        "assert model.device.resolve_device is model.resolve_device\n"
        "assert all(getattr(model.kronos, name) is getattr(anytorch, name) for name in names)\n"
        "assert model.model_dict['kronos'] is model.get_model_class('kronos') is anytorch.Kronos\n"
        "print(sorted(model.__all__))"
    )
    done = run("-c", code, folder=tmp_path, path=(COMPAT / "gitSource",))
    assert done.returncode == 0, done.stderr
    names = ["Kronos", "KronosPredictor", "KronosTokenizer", "get_model_class", "model_dict", "resolve_device"]
    assert done.stdout.strip() == str(names)


PROGRAM = """
import torch
from model import Kronos, KronosTokenizer, KronosPredictor, get_model_class
from model.kronos import auto_regressive_inference, calc_time_stamps, sample_from_logits, top_k_top_p_filtering
from model.module import *

block = TransformerBlock(d_model=32, n_heads=4, ff_dim=64, ffn_dropout_p=0.0, attn_dropout_p=0.0, resid_dropout_p=0.0)
x = torch.randn(2, 5, 32)
assert block(x, key_padding_mask=None).shape == x.shape
assert MultiHeadAttentionWithRoPE(d_model=32, n_heads=4)(x).shape == x.shape
assert MultiHeadCrossAttentionWithRoPE(d_model=32, n_heads=4)(query=x, key=x, value=x).shape == x.shape
assert DependencyAwareLayer(d_model=32)(hidden_states=x, sibling_embed=x).shape == x.shape
assert FeedForward(d_model=32, ff_dim=64)(x).shape == RMSNorm(dim=32, eps=1e-6)(x).shape == x.shape
assert HierarchicalEmbedding(s1_bits=3, s2_bits=3, d_model=32)(torch.zeros(2, 5).long()).shape == x.shape
assert TemporalEmbedding(d_model=32, learn_pe=False)(torch.ones(2, 5, 5)).shape == x.shape
assert DualHead(s1_bits=3, s2_bits=3, d_model=32)(x).shape == (2, 5, 8)
q = x.view(2, 1, 5, 32)
assert RotaryPositionalEmbedding(dim=32)(q, q)[0].shape == q.shape
loss, quantized, indices = BSQuantizer(4, 4, 0.05, 1.0, 1.1, 0.05, 4)(torch.randn(2, 5, 8), half=True)
assert quantized.shape == (2, 5, 8) and len(indices) == 2

model, tokenizer = Kronos.from_pretrained("tiny"), KronosTokenizer.from_pretrained("tiny")
predictor = get_model_class("kronos_predictor")(model, tokenizer, device="cpu", max_context=64)
z, stamp, ahead = torch.randn(2, 20, 6), torch.ones(2, 20, 5), torch.ones(2, 4, 5)
print(auto_regressive_inference(tokenizer, model, z, stamp, ahead, 64, 4, top_k=1).shape)
print(predictor.generate(z.numpy(), stamp.numpy(), ahead.numpy(), 4, 1.0, 1, 0.9, 1, False).shape)
try:
    get_model_class("chronos")
except NotImplementedError as exc:
    print(exc)
"""


def test_a_program_that_uses_all_of_the_package(tmp_path: Path) -> None:
    """Published import paths, argument names and calls: "put compat/gitSource on the path and change nothing"."""
    done = run("-c", PROGRAM, folder=tmp_path, path=(COMPAT / "gitSource",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "(2, 24, 6)",
        "(2, 4, 6)",
        "unknown model class 'chronos'; known: kronos_tokenizer, kronos, kronos_predictor",
    ]


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


@pytest.mark.long
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


@pytest.mark.slow
def test_one_documented_line_after_the_other(tmp_path: Path) -> None:
    """With one process, then with two in the same folder: another plan, which the original's scripts would overwrite."""
    script = str(COMPAT / "gitSource" / "finetune" / "train_tokenizer.py")
    short = ["--steps-per-epoch", "2", "--validation-windows", "8", "--batch-size", "4"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for start, processes in (([], 1), (torchrun, 2), (torchrun, 2)):
        done = run(*start, script, "--device", "cpu", *short, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        folder = tmp_path / "outputs" / "models" / "finetune_tokenizer_demo" / "checkpoints"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["processes"] == processes and summary["steps"] == 2
    assert summary["resumed_from"] == 2, "the same run once more has nothing left to do"


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
    from anytorch_compat.kronos_scripts import command_line

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
