"""Two processes on one real card: torchrun with gloo in NCCL's place, pools, and what comes of a process that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.test_train import run

import anytorch
from anytorch.forecast.pool import PredictorPool

pytestmark = pytest.mark.device

PROMPTS = ["The quick brown fox", "One token", "x", "日本語", "a page makes a text"]


@pytest.fixture
def twice(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The card's name for each of two processes, none of which may fall back to the CPU."""
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    name = accelerator.type if accelerator.type == "cpu" else f"{accelerator.type}:0"
    return [name, name]


def end_one(process_ids: Sequence[int | None]) -> None:
    os.kill(next(process for process in process_ids if process is not None), signal.SIGKILL)


def test_two_trainers_on_one_card_end_where_one_does(twice: list[str], tmp_path: Path) -> None:
    device = twice[0].partition(":")[0]
    one, _, alone, _ = run(tmp_path, 1, device)
    two, apart, together, size = run(tmp_path, 2, device)
    assert two == pytest.approx(one, abs=1e-5) and apart == 0.0
    assert size == 2 and alone.partition(":")[0] == together.partition(":")[0] == device


def test_two_predictors_on_one_card(twice: list[str]) -> None:
    series = [anytorch.sample_candles(60, seed=seed) for seed in range(8)]
    want = anytorch.load_predictor("tiny", device="cpu").predict_batch(series, pred_len=3, top_k=1, verbose=False)
    with PredictorPool("tiny", devices=twice, dtype="float32") as pool:
        for kill in (False, True):
            if kill:
                end_one(pool.process_ids)
            for ours, theirs in zip(pool.predict_batch(series, pred_len=3, top_k=1), want, strict=True):
                np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-3)
        assert [worker["device"] for worker in pool.describe()] == twice


def test_two_generators_on_one_card(twice: list[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.text.generate.conftest import make_model, make_tokenizer

    from anytorch.text.generate.generator import TextGenerator
    from anytorch.text.generate.pool import TextPool

    make_model(tmp_path, "llama")
    make_tokenizer(tmp_path)
    with TextGenerator(tmp_path, device="cpu", dtype="float32") as generator:
        want = [generator.complete(prompt, max_tokens=6, temperature=0).text for prompt in PROMPTS]
    with TextPool(tmp_path, devices=twice, at_once=2, dtype="float32") as pool:
        for kill in (False, True):
            if kill:
                end_one(pool.process_ids)
            assert [one.text for one in pool.complete(PROMPTS, max_tokens=6, temperature=0)] == want
        assert [worker["device"] for worker in pool.describe()] == twice
