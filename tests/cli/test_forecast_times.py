"""Which bars `anytorch forecast` forecasts: the next ones of the market, or exactly those that were held back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from anytorch.forecast.candles.generate import sample_candles

pytest.importorskip("torch")
QUICK = ("--device", "cpu", "--samples", "1", "--seed", "1", "--json")


def forecast(cli: Callable[..., Any], path: Path, *more: str) -> tuple[list[str], dict[str, Any]]:
    told = cli("forecast", str(path), *QUICK, *more)
    assert told.status == 0, told.err
    (series,) = json.loads(told.out)["series"]
    return [row["timestamp"] for row in series["forecast"]], series


@pytest.mark.parametrize(("rows", "horizon"), [(300, 120), (300, 60), (2000, 5)])
def test_the_hours_come_from_the_whole_file(cli: Callable[..., Any], tmp_path: Path, rows: int, horizon: int) -> None:
    """The model sees the last rows alone, and in them there may be no night."""
    candles = sample_candles(rows + horizon, freq="1min" if rows == 2000 else "5min")
    candles[:rows].to_csv(tmp_path / "ok.csv", index=False)
    times, series = forecast(cli, tmp_path / "ok.csv", "--horizon", str(horizon))
    assert series["lookback"] < rows
    assert times == [str(time) for time in candles["timestamps"][rows:]]


def test_a_holdout_forecasts_the_times_that_were_held_back(cli: Callable[..., Any], tmp_path: Path) -> None:
    candles = sample_candles(300).drop(index=[285, 286, 293])  # bars are missing in what is held back
    candles.to_csv(tmp_path / "ok.csv", index=False)
    times, series = forecast(cli, tmp_path / "ok.csv", "--horizon", "20", "--holdout")
    held = candles["timestamps"][-20:]
    assert times == [str(time) for time in held]
    assert pd.Timestamp(series["last"]["timestamp"]) == candles["timestamps"].iloc[-21]
