"""What `anytorch finetune` refuses before it reads, and what it says when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.cli.commands.finetune import read_config
from anytorch.cli.main import main
from anytorch.errors import InputError
from anytorch.forecast.training.loop import Run

SOURCES = Path(__file__).parents[2] / "src"
TRY = (
    *("finetune", "predictor", "--sample", "--device", "cpu", "--lookback", "8", "--horizon", "2", "--epochs", "1"),
    *("--steps-per-epoch", "6", "--batch-size", "2", "--validation-windows", "4"),
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--weight-decay", "nan"], "--weight-decay nan: use a number from 0 to"),
        (["--learning-rate", "-1"], "--learning-rate -1: use a number above 0"),
        (["--lora-rank", "-1"], "--lora-rank -1: use a whole number from 0 to"),
        (["--patience", "-1"], "--patience -1: use a whole number from 0 to"),
        (["--evaluate-every", "-1"], "--evaluate-every -1: use a whole number from 0 to"),
        (["--batch-size", "0"], "--batch-size 0: use a whole number from 1 to"),
        (["--from-scratch", "--lora-rank", "2"], "LoRA needs trained weights"),
        (["--context", "1"], "--context 1: use a whole number from 2"),
        (["--model", "foo"], "unknown model 'foo'"),
        (["--device", ""], "--device is empty"),
        (["--output", ""], "--output is empty"),
        (["--output", "here.yaml"], "--output here.yaml: that is a file"),
        (["--output", "here.yaml/run"], "here.yaml is a file, and a folder is needed"),
    ],
)
def test_mistakes_are_told_by_their_option(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.yaml").touch()
    told = cli(*TRY, "--output", "run", *arguments)
    assert told.status == 2 and said in told.err and "bug" not in told.err and "generated" not in told.err
    assert not Path("run").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="a folder in which not even root can write")
def test_a_place_that_cannot_exist(cli: Callable[..., Any]) -> None:
    told = cli(*TRY, "--output", "/proc/run/here")
    assert told.status == 2 and "--output /proc/run/here: nothing can be written there" in told.err


def test_a_window_that_nothing_was_trained_for_is_said(cli: Callable[..., Any], tmp_path: Path) -> None:
    short = (*TRY, "--steps-per-epoch", "1", "--validation-windows", "1")
    told = cli(*short, "--output", str(tmp_path / "a"), "--context", "100000")
    assert told.status == 0, told.err
    assert "warning: --context 100000: the model is trained only for windows of at most 128 rows" in told.err
    told = cli(*short, "--output", str(tmp_path / "b"), "--from-scratch", "--context", "20")
    assert told.status == 0 and "at most 10 rows" in told.err
    assert "warning" not in cli(*short, "--output", str(tmp_path / "c"), "--context", "128").err


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_long_evaluation_says_how_far_it_is_where_there_is_no_terminal(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: tuple[str, ...]
) -> None:
    """The evaluation before the first step lasts for minutes with a large model: it is not silent, nor is it an answer."""
    ticks = iter(range(0, 1_000_000, 20))
    monkeypatch.setattr("anytorch.cli.output.Pace.__init__.__defaults__", (lambda: float(next(ticks)),))
    monkeypatch.setattr("anytorch.forecast.training.loop.TOLD_EVERY_S", 0.0)
    told = cli(*TRY, "--validation-windows", "8", "--output", str(tmp_path / "run"), *extra)
    assert told.status == 0, told.err
    lines = [line for line in told.err.splitlines() if line.startswith("training the predictor: ")]
    assert lines[0] == "training the predictor: 0 of 6, validation: 6 of 8 windows"
    assert any("loss" in line and line.endswith(" left") for line in lines)
    assert "training the predictor" not in told.out


@pytest.mark.parametrize("step", [0, 3])
def test_ctrl_c_says_what_was_saved(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    real, folder = Run.evaluate if step == 0 else Run._take_step, tmp_path / "run"

    def stopped(self: Run) -> Any:
        if self.step == step:
            signal.raise_signal(signal.SIGINT)
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "evaluate" if step == 0 else "_take_step", stopped)
        told = cli(*TRY, "--output", str(folder), "--learning-rate", "1e-3")
    assert told.status == 130
    if step == 0:
        assert "no step was finished; nothing was saved" in told.err and not (folder / "last.pt").exists()
        assert cli(*TRY, "--output", str(folder)).status == 0, "other options: there is nothing to go on from"
        return
    assert f"what was saved is in {folder}; the same command resumes it" in told.err
    assert cli(*TRY, "--output", str(folder)).status == 2, "other options"
    done = cli(*TRY, "--output", str(folder), "--learning-rate", "1e-3", "--json")
    assert done.status == 0 and done.document["resumed_from"] == 4 and done.document["steps"] == 6


def test_a_lack_of_memory_is_no_bug(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(self: Run) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(Run, "_take_step", lacking)
    told = cli(*TRY, "--output", str(tmp_path / "run"), "--json")
    assert told.status == 1 and told.document["error"]["type"] == "OutOfMemory" and "--batch-size" in told.err


@pytest.mark.parametrize(
    ("variables", "waits"),
    [({"RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, True), ({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, False),
     ({"RANK": "1"}, False)],
)  # fmt: skip
def test_of_several_processes_the_first_one_tells_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], waits: bool
) -> None:
    """The others wait until torchrun ends them; if it does not, the first has found nothing, and they tell."""
    said_before: list[str] = []
    monkeypatch.setattr("anytorch.cli.main.time.sleep", lambda seconds: said_before.append(capsys.readouterr().err))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*TRY, "--output", "run", "--patience", "-1"]) == 2
    assert said_before == ([""] if waits else []) and "--patience -1" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_tells_a_mistake_once() -> None:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "anytorch"]
    done = subprocess.run(
        [sys.executable, *start, *TRY, "--output", "run", "--patience", "-1"],
        env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0 and done.stderr.count("--patience -1: use a whole number") == 1, done.stderr


@pytest.mark.parametrize("value", ["2024-13-45", "9" * 5000, "[" * 5000, "{", "*a", "2001-01-01 25:61:00"])
def test_what_yaml_cannot_read_is_named(value: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data:\n  lookback_window: {value}\n")
    with pytest.raises(InputError, match=r"config\.yaml is not YAML"):
        read_config(path, "tokenizer")


def test_a_name_that_no_folder_can_have_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data:\n  data_path: a.csv\nmodel_paths:\n  base_path: x\n  finetuned_tokenizer: {'a' * 5000}\n")
    assert read_config(path, "predictor").tokenizer is None


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e400", "9" * 400, "[1]", "true"])
@pytest.mark.parametrize("name", ["lookback_window", "clip"])
def test_a_number_of_a_settings_file_is_finite(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"data:\n  data_path: a.csv\n  {name}: {value}\n")
    with pytest.raises(InputError, match=f"data.{name} is .*, not a number"):
        read_config(path, "tokenizer")
