"""Forecasts of a pool are those of one predictor, also when a device dies under way."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import anytorch
from anytorch.errors import InputError, ModelError
from anytorch.forecast.pool import PredictorPool


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


def test_a_model_that_is_not_there_is_told_before_processes_start() -> None:
    with pytest.raises(ModelError, match="unknown model"):
        PredictorPool("no such", devices=["cpu"])
