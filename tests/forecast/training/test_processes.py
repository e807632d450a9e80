"""Two processes are one with twice the batch; and a killed run, resumed, ends where an undisturbed one does, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch.errors import InputError
from anytorch.forecast.model import Kronos, KronosTokenizer
from anytorch.forecast.model.pretrained import Pretrained
from anytorch.forecast.training import finetune_predictor, finetune_tokenizer

SOURCES = Path(__file__).parents[3] / "src"

PROGRAM = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from anytorch.forecast.candles.generate import sample_market
from anytorch.forecast.training import finetune_predictor, finetune_tokenizer

if __name__ == "__main__":
    todo = json.loads(sys.argv[1])
    kill_at = todo["kill_at"]

    def progress(done, total, what):
        if done == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    market = sample_market(2, 400, seed=4)
    for job in todo["jobs"]:
        call = finetune_tokenizer if job.pop("kind") == "tokenizer" else finetune_predictor
        call(market, progress=progress, **job)
"""


def run_program(folder: Path, jobs: list[dict[str, Any]], *, processes: int = 1, kill_at: int = -1) -> Any:
    script = folder / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *start, str(script), json.dumps({"jobs": jobs, "kill_at": kill_at}, default=str)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def weights(module: Pretrained) -> torch.Tensor:
    return torch.cat([value.flatten() for value in module.parameters()]).detach()


@pytest.mark.long
def test_two_processes_are_one_with_twice_the_batch(
    market: Any, shape: dict[str, Any], tokenizer_config: Any, model_config: Any, tmp_path: Path
) -> None:
    """Through torchrun, as users start it. The tokenizer's loss is no mean over windows (it has an entropy of the batch)."""
    torch.manual_seed(0)
    KronosTokenizer(**tokenizer_config).save_pretrained(tmp_path / "tok0")
    Kronos(**model_config).save_pretrained(tmp_path / "model0")

    def jobs(output: str, batch: int, folder: str = "") -> list[dict[str, Any]]:
        common = {**shape, "batch_size": batch, "steps_per_epoch": 6, "validation_windows": 25, "accumulate": 2}
        common["epsilon"] = (
            1e-4  # below it a difference in the last bit is nothing, and does not decide a step's direction
        )
        start = {"tokenizer": str(tmp_path / "tok0")}
        return [
            {"kind": "tokenizer", "output": str(tmp_path / output / "tok"), **start, **common},
            {"kind": "model", "output": str(tmp_path / output / "model"), **start, **common}
            | {"model": str(tmp_path / "model0")},
        ]

    done = run_program(tmp_path, jobs("two", 4), processes=2)
    assert done.returncode == 0, done.stderr
    for job in jobs("one", 8):
        call = finetune_tokenizer if job.pop("kind") == "tokenizer" else finetune_predictor
        call(market, **job)
    for job in jobs("alone", 4):  # what a process would do that is not synchronised
        call = finetune_tokenizer if job.pop("kind") == "tokenizer" else finetune_predictor
        call(market, **job)
    for kind, cls in (("tok", KronosTokenizer), ("model", Kronos)):
        start = weights(cls.from_pretrained(tmp_path / f"{kind}0"))
        one, two, alone = (
            weights(cls.from_pretrained(tmp_path / n / kind / "best_model")) for n in ("one", "two", "alone")
        )
        moved = (one - start).norm()
        assert (one - two).norm() / moved < 1e-4, kind
        assert (one - alone).norm() / moved > 0.05, "the measure tells the two apart"
        summary = json.loads((tmp_path / "two" / kind / "summary.json").read_text())
        same = json.loads((tmp_path / "one" / kind / "summary.json").read_text())
        assert summary["processes"] == 2 and summary["best_loss"] == pytest.approx(same["best_loss"], abs=1e-4)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    market: Any, shape: dict[str, Any], tokenizer_config: Any, model_config: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    KronosTokenizer(**tokenizer_config).save_pretrained(tmp_path / "tok0")
    dropout = {**model_config, "ffn_dropout_p": 0.2, "token_dropout_p": 0.1}  # random numbers count, too
    job = {
        **shape,
        "steps_per_epoch": 6,
        "epochs": 2,
        "evaluate_every": 4,
        "model": dropout,
        "tokenizer": str(tmp_path / "tok0"),
        "objective": "published",
    }
    whole = finetune_predictor(market, output=tmp_path / "whole", **job)
    killed = run_program(tmp_path, [{"kind": "model", "output": str(tmp_path / "cut"), **job}], kill_at=8)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = json.loads((tmp_path / "cut" / "log.jsonl").read_text().splitlines()[-1])
    assert left["step"] == 8, "it had gone beyond its last save, in the second epoch"
    resumed = finetune_predictor(market, output=tmp_path / "cut", **job)
    assert resumed.resumed_from == 6 and resumed.steps == whole.steps == 12
    states = [torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("whole", "cut")]
    for name, value in states[0]["weights"].items():
        assert torch.equal(value, states[1]["weights"][name]), name
    for one, other in zip(*(list(s["optimiser"]["state"].values()) for s in states), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert resumed.history == whole.history and resumed.best_loss == whole.best_loss
    assert torch.equal(*(weights(Kronos.from_pretrained(tmp_path / n / "best_model")) for n in ("whole", "cut")))
    whole_files, cut_files = (
        {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (tmp_path / n / "best_model" for n in ("whole", "cut"))
    )
    assert whole_files == cut_files and "anytorch.json" in cut_files and "tokenizer/config.json" in cut_files
    again = finetune_predictor(market, output=tmp_path / "cut", **job)
    assert again.resumed_from == again.steps == 12, "a finished run is not trained any further"
    with pytest.raises(InputError, match="another plan, other data or another model"):
        finetune_predictor(market, output=tmp_path / "cut", **{**job, "learning_rate": 1e-4})
    fresh = finetune_predictor(market, output=tmp_path / "cut", resume=False, **{**job, "learning_rate": 1e-4})
    assert fresh.resumed_from == 0 and fresh.steps == 12
