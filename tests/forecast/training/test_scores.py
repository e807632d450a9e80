"""Scores that are proper, baselines that are what they say, and a comparison that tells a good model from a bad one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_market
from anytorch.forecast.candles.tables import FIELDS
from anytorch.forecast.training.scores import baseline, compare, crps, origins
from anytorch.forecast.training.windows import as_series, as_values, split_windows


def test_crps_of_a_point_is_the_absolute_error() -> None:
    assert crps(np.array([[3.0]]), np.array([1.0])) == pytest.approx(2.0)


def test_crps_is_the_known_one_of_a_normal_distribution() -> None:
    """CRPS(N(0, 1), 0) = (√2 - 1) / √π, whatever the number of samples: the estimator is fair."""
    random = np.random.default_rng(0)
    want = (np.sqrt(2) - 1) / np.sqrt(np.pi)
    for count in (2, 5, 200):
        found = crps(random.normal(size=(count, 40_000)), np.zeros(40_000)).mean()
        assert found == pytest.approx(want, abs=0.01)


def test_crps_prefers_the_truth() -> None:
    random = np.random.default_rng(1)
    truth = random.normal(size=20_000)
    right, narrow, wide, off = (
        crps(shift + spread * random.normal(size=(20, 20_000)), truth).mean()
        for shift, spread in ((0, 1), (0, 0.2), (0, 4), (1, 1))
    )
    assert right < min(narrow, wide, off)


def test_baselines() -> None:
    past, random = np.arange(10.0), np.random.default_rng(0)
    assert baseline("last value", past, 3, 4, 5, random).tolist() == [[9, 9, 9]]
    assert baseline("seasonal", past, 6, 4, 5, random).tolist() == [[6, 7, 8, 9, 6, 7]]
    assert baseline("random walk", past, 3, 4, 2, random).tolist() == [[10, 11, 12]] * 2  # every step was 1
    with pytest.raises(InputError, match="a season of 20"):
        baseline("seasonal", past, 3, 20, 5, random)


class Oracle:
    """Knows the future and adds noise of a given size; the comparison should see the size."""

    def __init__(self, series: list[Any], noise: float) -> None:
        self.noise, self.random = noise, np.random.default_rng(0)
        self.frames = [one.frame for one in series]

    def forecast_batch(self, histories: list[Any], y_timestamp_list: list[Any], **options: Any) -> list[Any]:
        found = []
        for history, ahead in zip(histories, y_timestamp_list, strict=True):
            frame = next(f for f in self.frames if f["close"].iloc[history.index[0]] == history["close"].iloc[0])
            truth = as_values(frame.loc[ahead.index])
            size = as_values(history).std(axis=0) * self.noise
            samples = truth + size * self.random.normal(size=(options["sample_count"], *truth.shape))
            found.append(SimpleNamespace(samples=samples))
        return found


def test_a_good_forecast_wins_and_a_bad_one_loses() -> None:
    series = as_series(sample_market(3, 500, seed=6, freq="1h", session="always"))
    options: dict[str, Any] = {
        "lookback": 48,
        "horizon": 8,
        "season": 24,
        "validation": 0.2,
        "test": 0.3,
        "samples": 10,
    }
    good, bad = compare(Oracle(series, 0.05), series, **options), compare(Oracle(series, 20.0), series, **options)
    assert {score.verdict for score in good.scores} == {"better"}
    assert {score.verdict for score in bad.scores} == {"worse"}
    assert all(score.low <= score.skill <= score.high for score in (*good.scores, *bad.scores))
    assert {score.column for score in good.scores} == {"close", "volume"} and set(FIELDS) > {"close", "volume"}
    assert good.instruments == 3 and good.windows > 30
    assert good.coverage["close"] > 0.9, "its samples lie around the truth"


def test_held_out_windows_do_not_overlap_in_what_they_forecast() -> None:
    series = as_series(sample_market(2, 300, seed=6))
    windows = split_windows(series, lookback=20, horizon=6, test=0.4)["test"]
    places = origins(series, windows, 10**6)
    for number in (0, 1):
        starts = [start for place, start in places if place == number]
        assert len(starts) > 5 and min(np.diff(starts)) >= 6
    assert len(origins(series, windows, 7)) == 7
