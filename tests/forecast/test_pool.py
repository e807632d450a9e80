"""Forecasts of a pool are those of one predictor, also when a device dies under way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anytorch
from anytorch.errors import InputError, ModelError
from anytorch.forecast.pool import PredictorPool, counted_from


@pytest.mark.long
def test_two_processes_forecast_what_one_predictor_does_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    series = [anytorch.sample_candles(60, seed=seed) for seed in range(8)]
    want = anytorch.load_predictor("tiny", device="cpu").predict_batch(series, pred_len=3, top_k=1, verbose=False)
    with PredictorPool("tiny", devices=["cpu", "cpu"]) as pool:
        for kill in (False, True):
            if kill:
                os.kill(next(process for process in pool.process_ids if process is not None), signal.SIGKILL)
            found = pool.predict_batch(series, pred_len=3, top_k=1)
            assert len(found) == len(want)
            for ours, theirs in zip(found, want, strict=True):
                np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-4)
        assert sum(worker["calls"] for worker in pool.describe()) == 2 * 6 or all(w["calls"] for w in pool.describe())
        with pytest.raises(InputError):
            pool.predict_batch(series[0], pred_len=3)
        with pytest.raises(InputError):
            pool.predict_batch([series[0].iloc[:0]], pred_len=3)
        with pytest.raises(InputError, match="series 6 has 0 rows"):
            pool.predict_batch([*series[:6], series[0].iloc[:0], series[0]], pred_len=3)
        assert pool.predict_batch([], pred_len=3) == []


def test_a_series_of_a_part_is_named_by_its_place_in_the_whole() -> None:
    assert (
        counted_from(6, "the history has 0 rows; at least 2 are needed") == "series 6 has 0 rows; at least 2 are needed"
    )
    assert counted_from(2, "series 1 has 3 times to forecast, series 0 has 2").startswith(
        "series 3 has 3 times to forec"
    )
    assert counted_from(2, "series 1 has 3 times to forecast, series 0 has 2").endswith("series 2 has 2")
    assert counted_from(2, "T is 0") == "T is 0"


@pytest.mark.long
def test_two_devices_of_another_kind(
    npu_extension: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_cache: Callable[[str], Path]
) -> None:
    """The compiled test device, which the workers' `import torch` loads: a worker on each, and one that dies."""
    series = [anytorch.sample_candles(60, seed=seed) for seed in range(4)]
    want = anytorch.load_predictor("tiny", device="cpu").predict_batch(series, pred_len=2, top_k=1, verbose=False)
    monkeypatch.syspath_prepend(npu_extension.plugin(tmp_path / "npu"))
    monkeypatch.setenv("ANYTORCH_STRICT", "1")  # no worker falls back to the CPU
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(shared_cache("forecast-npu")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with PredictorPool("tiny", devices=["npu:0", "npu:1"], dtype="float32") as pool:
        for kill in (False, True):
            if kill:
                os.kill(next(process for process in pool.process_ids if process is not None), signal.SIGKILL)
            for ours, theirs in zip(pool.predict_batch(series, pred_len=2, top_k=1), want, strict=True):
                np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=1e-3)
        told = pool.describe()
    assert [one["device"] for one in told] == ["npu:0", "npu:1"]


def test_a_model_that_is_not_there_is_told_before_processes_start() -> None:
    with pytest.raises(ModelError, match="unknown model"):
        PredictorPool("no such", devices=["cpu"])
