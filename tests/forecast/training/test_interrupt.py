"""Ctrl-C and full disks: what was whole is kept, what was half done is not, and the message says which."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anytorch.errors import InputError, ModelError, OutputError, UsageError
from anytorch.forecast.model import KronosTokenizer
from anytorch.forecast.training import TrainingPlan, finetune_tokenizer
from anytorch.forecast.training.loop import Run, fingerprint
from anytorch.forecast.training.plan import wrong
from anytorch.forecast.training.store import RunFolder, writing
from anytorch.interrupts import Interrupt
from anytorch.train import World


def pressed() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_other_processes_go_on_until_the_first_has_left(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = Interrupt(first=False)
    with interrupt:
        pressed()
        with interrupt.held():
            pressed()
    assert interrupt.asked_at is not None and not interrupt.broken

    def alone(self: Run) -> None:
        raise RuntimeError("[gloo] Connection closed by peer")

    monkeypatch.setattr(World, "first", False)
    monkeypatch.setattr(Run, "_take_step", alone)
    with pytest.raises(RuntimeError, match="closed by peer"):
        finetune_tokenizer(**job)

    def asked(self: Run) -> None:
        pressed()
        alone(self)

    monkeypatch.setattr(Run, "_take_step", asked)
    with pytest.raises(KeyboardInterrupt):
        finetune_tokenizer(**job)
    assert not (tmp_path / "run").exists(), "only the first writes"


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(market: Any, shape: dict[str, Any], tokenizer_config: Any, tmp_path: Path) -> dict[str, Any]:
    plan = {**shape, "steps_per_epoch": 8, "evaluate_every": 4, "save_every": 100}
    return {"data": market, "tokenizer": tokenizer_config, "output": tmp_path / "run", **plan}


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "last.pt", weights_only=True)
    best = KronosTokenizer.from_pretrained(folder / "best_model")
    return torch.cat([part.flatten() for part in (*state["weights"].values(), *best.parameters())]).detach()


def outcome(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    kept = {name: summary[name] for name in ("best_loss", "best_step", "first_loss", "steps", "stopped_early")}
    return {**kept, "log": (folder / "log.jsonl").read_text()}


@pytest.mark.parametrize("where", ["in a step", "while evaluating", "after evaluating"])
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_happened(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nothing was saved before: `save_every` is out of reach."""
    finetune_tokenizer(**{**job, "output": tmp_path / "whole"})
    step, evaluate, save_best = Run._take_step, Run.evaluate, Run.save_best

    def take_step(self: Run) -> Any:
        if where == "in a step" and self.step == 5:
            pressed()
        return step(self)

    def evaluated(self: Run) -> float:
        if where == "while evaluating" and self.step == 4:
            pressed()
        return evaluate(self)

    def saved(self: Run) -> None:
        save_best(self)
        if where == "after evaluating" and self.step == 4:
            pressed()

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_take_step", take_step)
        patched.setattr(Run, "evaluate", evaluated)
        patched.setattr(Run, "save_best", saved)
        with pytest.raises(KeyboardInterrupt):
            finetune_tokenizer(**job)
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert state["step"] == (6 if where == "in a step" else 4), "every step that was finished is kept"
    assert state["checked"] is (where != "while evaluating")
    done = finetune_tokenizer(**job)
    assert done.resumed_from == state["step"]
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("where", ["before the first step", "twice in a step"])
def test_what_is_half_done_is_not_saved(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    step, evaluate = Run._take_step, Run.evaluate

    def take_step(self: Run) -> Any:
        if self.step == 2:
            pressed()
            self.interrupt.clock = lambda: math.inf  # much later
            pressed()
        return step(self)

    def evaluated(self: Run) -> float:
        if where == "before the first step":
            pressed()
        return evaluate(self)

    monkeypatch.setattr(Run, "_take_step", take_step)
    monkeypatch.setattr(Run, "evaluate", evaluated)
    with pytest.raises(KeyboardInterrupt):
        finetune_tokenizer(**job)
    assert not (tmp_path / "run" / "last.pt").exists()


# --- disks --------------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="a limit that the system enforces like a full disk")
def test_a_state_for_which_there_is_no_room(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.save({"fingerprint": "a", "weights": torch.zeros(10)})
    before = folder.state.read_bytes()
    with files_of_at_most(4096), pytest.raises(OutputError) as caught:
        folder.save({"fingerprint": "a", "weights": torch.zeros(100_000)})
    assert f"{folder.state} cannot be written: {os.strerror(errno.EFBIG)}" in caught.value.message
    assert folder.state.read_bytes() == before and list(folder.folder.iterdir()) == [folder.state]
    with files_of_at_most(10), pytest.raises(OutputError, match=r"summary\.json cannot be written"):
        folder.write_summary({"long": "x" * 100})
    with files_of_at_most(10), pytest.raises(OutputError, match=r"log\.jsonl cannot be written"):
        folder.note(step=1, words="x" * 100)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit that the system enforces like a full disk")
def test_best_weights_for_which_there_is_no_room(job: dict[str, Any], tmp_path: Path) -> None:
    with files_of_at_most(4096), pytest.raises(OutputError, match="best_model cannot be written: File too large"):
        finetune_tokenizer(**job)


def test_an_error_that_is_no_disks_passes_through(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="something else"), writing(tmp_path):
        raise RuntimeError("something else")


def test_whose_state_it_is_is_told_without_reading_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.load("a", "cpu", mmap=True)  # nothing is there
    folder.save({"fingerprint": "a", "weights": torch.zeros(1000)})
    asked: list[Any] = []
    load = torch.load

    def noted(*args: Any, **how: Any) -> Any:
        asked.append(how.get("mmap"))
        return load(*args, **how)

    monkeypatch.setattr(torch, "load", noted)
    folder.load("a", "cpu", mmap=True)
    with pytest.raises(InputError, match="holds a run with another plan"):
        folder.load("b", "cpu", mmap=True)
    assert asked == [True, True]
    folder.state.write_bytes(b"no state")
    with pytest.raises(ModelError, match="cannot be read"):
        folder.load("a", "cpu", mmap=True)


# --- plans --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("weight_decay", float("nan"), "use a number from 0 to"),
        ("weight_decay", -0.1, "use a number from 0 to"),
        ("learning_rate", -1.0, "use a number above 0"),
        ("learning_rate", float("inf"), "use a number above 0"),
        ("patience", -1, "use a whole number from 0 to"),
        ("evaluate_every", -1, "use a whole number from 0 to"),
        ("steps_per_epoch", -1, "use a whole number from 0 to"),
        ("validation_windows", -1, "use a whole number from 0 to"),
        ("lora_rank", -1, "use a whole number from 0 to"),
        ("lookback", 1, "use a whole number from 2 to"),
        ("epochs", 1.5, "use a whole number from 1 to"),
        ("epochs", True, "use a whole number from 1 to"),
        ("seed", 2**63, "use a whole number from 0 to"),
        ("validation", float("nan"), "use a number from 0 to below 1"),
        ("betas", (0.9, 1.0), "use two numbers from 0 to below 1"),
        ("betas", 0.9, "use two numbers from 0 to below 1"),
        ("betas", ("0.9", 0.95), "use two numbers from 0 to below 1"),
        ("betas", "09", "use two numbers from 0 to below 1"),
        ("learning_rate", "3e-4", "use a number above 0"),
        ("learning_rate", True, "use a number above 0"),
        ("warm_up", None, "use a number from 0 to below 1"),
        ("weight_decay", [0.1], "use a number from 0 to"),
        ("mixed_precision", "no", "use True or False"),
    ],
)
def test_what_a_plan_may_say(name: str, value: Any, said: str) -> None:
    assert wrong(name, value).startswith(said)
    with pytest.raises(UsageError) as caught:
        TrainingPlan(**{name: value})
    assert caught.value.message.startswith(f"{name}={value!r}: {said}")
    assert all(not wrong(field, getattr(TrainingPlan(), field)) for field in TrainingPlan.__dataclass_fields__)


def test_numbers_of_numpy_make_the_same_plan() -> None:
    given = TrainingPlan(batch_size=np.int64(32), clip=np.float32(5), clip_norm=3, betas=[np.float64(0.9), 0.95])
    assert repr(given) == repr(TrainingPlan(batch_size=32)) and hash(given) == hash(TrainingPlan(batch_size=32))
    assert json.dumps(asdict(given)) == json.dumps(asdict(TrainingPlan(batch_size=32)))


def test_numbers_of_numpy_make_the_same_fingerprint(tmp_path: Path) -> None:
    windows: Any = SimpleNamespace(values=np.zeros((4, 6), np.float32), starts=np.arange(2))
    alone: Any = SimpleNamespace(size=1)
    what = {"config": {"d_model": np.int64(32), "dropout": np.float32(0.5), "causal": np.True_}, "folder": tmp_path}
    same = {"config": {"d_model": 32, "dropout": 0.5, "causal": True}, "folder": str(tmp_path)}
    assert fingerprint(TrainingPlan(), alone, windows, what) == fingerprint(TrainingPlan(), alone, windows, same)
    RunFolder(tmp_path).write_summary(what)
    assert json.loads((tmp_path / "summary.json").read_text()) == same
