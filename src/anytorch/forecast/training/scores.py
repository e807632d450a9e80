"""Score forecasts against simple baselines over many held-out windows, with confidence intervals.

Errors are divided by the standard deviation of the window's own past, so that instruments can be averaged. Points are
judged by the mean absolute error of the median path, whole distributions by the continuous ranked probability score
(CRPS); for a single value the CRPS is the absolute error, so both kinds can stand in one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from anytorch.errors import InputError
from anytorch.forecast.candles.read import CandleSeries
from anytorch.forecast.candles.tables import FIELDS
from anytorch.forecast.training.windows import Windows, as_values, split_windows
from anytorch.values import dataclass

BASELINES = ("last value", "seasonal", "random walk")
RESAMPLED = 2000  # bootstrap draws
EPS = 1e-12


def crps(samples: Any, truth: Any) -> Any:
    """The continuous ranked probability score of samples [samples, …] for truth […]; lower is better.

    The fair estimator: with the spread taken over pairs of different samples, more samples change its noise, not its mean.
    """
    count = len(samples)
    error = np.abs(samples - truth).mean(axis=0)
    if count == 1:
        return error
    ranked = np.sort(samples, axis=0)
    weights = (2 * np.arange(1, count + 1) - count - 1).reshape(-1, *[1] * (ranked.ndim - 1))
    spread = (weights * ranked).sum(axis=0) / (count * (count - 1))  # half the mean distance of two samples
    return error - spread


def baseline(name: str, past: Any, horizon: int, season: int, samples: int, random: Any) -> Any:
    """Sample paths [samples, horizon] of one column from its past rows.

    "last value": it stays as it is. "seasonal": as one season ago (a day, a week). "random walk": the last value plus
    changes drawn from the past, which also knows how wide to spread.
    """
    if name == "last value":
        return np.full((1, horizon), past[-1])
    if name == "seasonal":
        if len(past) < season:
            raise InputError(f"a season of {season} rows is longer than the past of {len(past)}")
        return np.resize(past[-season:], horizon)[None]  # repeated where the horizon is longer than a season
    steps = np.diff(past)
    return past[-1] + np.cumsum(random.choice(steps, (samples, horizon)), axis=1)


@dataclass(frozen=True)
class Score:
    """One column and measure: the model's mean, a baseline's, and how much better the model is (1: perfect, 0: equal)."""

    column: str
    measure: str  # "MAE" or "CRPS"
    baseline: str
    model: float
    other: float
    skill: float
    low: float  # 95 % interval of the skill, by resampling windows
    high: float

    @property
    def verdict(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "no difference shown"


@dataclass(frozen=True)
class Comparison:
    scores: tuple[Score, ...]
    windows: int
    instruments: int
    lookback: int
    horizon: int
    samples: int
    season: int
    period: tuple[str, str]
    coverage: dict[str, float]  # share of true values between the 10 % and 90 % quantiles; 0.8 is right


def origins(series: Sequence[CandleSeries], windows: Windows, most: int) -> list[tuple[int, int]]:
    """(series, first row) of evaluation windows whose futures do not overlap, evenly spread."""
    edges = np.cumsum([0, *map(len, series)])
    chosen = []
    for place, (begin, end) in enumerate(pairwise(edges)):
        own = windows.starts[(windows.starts >= begin) & (windows.starts < end)] - begin
        last = -windows.horizon
        for start in own:
            if start >= last + windows.horizon:
                chosen.append((place, int(start)))
                last = start
    if len(chosen) > most:
        chosen = [chosen[int(n)] for n in np.linspace(0, len(chosen) - 1, most).round()]
    return chosen


def compare(
    predictor: Any,
    series: Sequence[CandleSeries],
    *,
    lookback: int,
    horizon: int,
    season: int,
    validation: float = 0.1,
    test: float = 0.1,
    columns: Sequence[str] = ("close", "volume"),
    samples: int = 20,
    most_windows: int = 200,
    seed: int = 0,
    **options: Any,
) -> Comparison:
    """Forecast windows of the test period (the latest share of the data) and score them against the baselines.

    The test period is that of a training run with the same `validation` and `test`. `options` go to `forecast_batch`
    (T, top_p, …).
    """
    windows = split_windows(series, lookback=lookback, horizon=horizon, validation=validation, test=test)["test"]
    places = origins(series, windows, most_windows)
    if not places:
        raise InputError(f"the test period {windows.period} holds no window of {windows.length} rows")
    frames = [series[place].frame for place, _ in places]
    found = predictor.forecast_batch(
        [frame.iloc[start : start + lookback] for frame, (_, start) in zip(frames, places, strict=True)],
        y_timestamp_list=[
            frame["timestamps"].iloc[start + lookback : start + lookback + horizon]
            for frame, (_, start) in zip(frames, places, strict=True)
        ],
        pred_len=horizon,
        sample_count=samples,
        seed=seed,
        verbose=False,
        **options,
    )
    random = np.random.Generator(np.random.PCG64(seed))
    scores: list[Score] = []
    coverage = {}
    for column in columns:
        number = FIELDS.index(column)
        per_window: dict[str, list[tuple[float, float]]] = {name: [] for name in ("model", *BASELINES)}
        inside = []
        for (place, start), forecast in zip(places, found, strict=True):
            values = as_values(series[place].frame)[start : start + lookback + horizon, number].astype(np.float64)
            past, truth = values[:lookback], values[lookback:]
            scale = past.std() + EPS
            paths = {"model": forecast.samples[:, :, number].astype(np.float64)}
            for name in BASELINES:
                paths[name] = baseline(name, past, horizon, season, samples, random)
            for name, path in paths.items():
                point = np.abs(np.median(path, axis=0) - truth).mean() / scale
                per_window[name].append((float(point), float(crps(path, truth).mean() / scale)))
            low, high = np.quantile(paths["model"], (0.1, 0.9), axis=0)
            inside.append(((truth >= low) & (truth <= high)).mean())
        coverage[column] = float(np.mean(inside))
        table = {name: np.array(values) for name, values in per_window.items()}
        for which, measure in enumerate(("MAE", "CRPS")):
            for name in BASELINES:
                scores.append(_score(column, measure, name, table["model"][:, which], table[name][:, which], random))
    counts = (len(places), len({place for place, _ in places}), lookback, horizon, samples, season)
    return Comparison(tuple(scores), *counts, windows.period, coverage)


def _score(column: str, measure: str, name: str, model: Any, other: Any, random: Any) -> Score:
    drawn = random.integers(len(model), size=(RESAMPLED, len(model)))
    skills = 1 - model[drawn].mean(axis=1) / (other[drawn].mean(axis=1) + EPS)
    low, high = np.quantile(skills, (0.025, 0.975))
    skill = 1 - float(model.mean()) / (float(other.mean()) + EPS)
    return Score(column, measure, name, float(model.mean()), float(other.mean()), skill, float(low), float(high))
