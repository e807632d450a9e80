"""The generator has the properties it claims, and the same seed gives the same candles."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import Recipe, sample_candles, sample_market
from anytorch.forecast.candles.tables import FIELDS


def correlation(values: np.ndarray, lag: int) -> float:
    centred = values - values.mean()
    return float((centred[lag:] * centred[:-lag]).mean() / centred.var())


@pytest.fixture(scope="module")
def long() -> pd.DataFrame:
    return sample_candles(20_000, seed=5)


@pytest.fixture(scope="module")
def inside(long: pd.DataFrame) -> np.ndarray:
    """Returns within bars: no nights."""
    return np.log(long["close"] / long["open"]).to_numpy()


@pytest.mark.parametrize(
    ("freq", "session"), [("5min", None), ("1h", "always"), ("1D", None), ("W-FRI", None), ("MS", None), ("1min", None)]
)
def test_candles_are_candles(freq: str, session: str | None) -> None:
    frame = sample_candles(700, freq=freq, session=session, seed=3, price=0.05)
    assert list(frame.columns) == ["timestamps", *FIELDS] and len(frame) == 700
    assert (frame["low"] <= frame[["open", "close"]].min(axis=1)).all()
    assert (frame["high"] >= frame[["open", "close"]].max(axis=1)).all()
    assert (frame[["open", "high", "low", "close", "volume"]] > 0).all().all()
    assert frame["timestamps"].is_monotonic_increasing and frame["timestamps"].is_unique
    typical = frame[["open", "high", "low", "close"]].mean(axis=1)
    np.testing.assert_allclose(frame["amount"], frame["volume"] * typical, atol=0.01)


def test_the_seed_decides() -> None:
    pd.testing.assert_frame_equal(sample_candles(300, seed=7), sample_candles(300, seed=7))
    assert not sample_candles(300, seed=7)["close"].equals(sample_candles(300, seed=8)["close"])


def test_an_exchange_closes_at_night_and_at_weekends() -> None:
    times = sample_candles(2000, freq="15min")["timestamps"]
    assert set(times.dt.day_of_week) == {0, 1, 2, 3, 4}
    assert times.dt.strftime("%H:%M").min() == "09:30" and times.dt.strftime("%H:%M").max() == "15:45"
    always = sample_candles(24 * 14, freq="1h", session="always")["timestamps"]
    assert set(always.dt.day_of_week) == set(range(7)) and always.diff().dropna().nunique() == 1


def test_tails_are_fat_and_volatility_clusters(inside: np.ndarray) -> None:
    kurtosis = ((inside - inside.mean()) ** 4).mean() / inside.var() ** 2
    assert kurtosis > 4.5  # a normal distribution has 3
    size = np.abs(inside)
    noise = 4 / np.sqrt(len(size))  # four standard errors of white noise's autocorrelation
    assert all(correlation(size, lag) > noise for lag in (1, 5, 20))
    assert correlation(size, 1) > 0.1 and abs(correlation(inside, 1)) < 0.08


def test_the_price_returns_by_the_share_that_was_asked_for() -> None:
    """Lo and MacKinlay's variance ratio: 1 for a random walk, below it where moves are undone."""

    def ratio(reversion: float) -> float:
        found = []
        for seed in range(4):
            frame = sample_candles(8000, seed=seed, session="always", recipe=Recipe(reversion=reversion))
            close = np.log(frame["close"].to_numpy())
            found.append(np.var(close[40:] - close[:-40]) / (40 * np.var(np.diff(close))))
        return float(np.mean(found))

    walk, some, much = ratio(0.0), ratio(0.5), ratio(0.9)
    assert 0.85 < walk < 1.2 and much < some < 0.8 * walk


def test_nights_leave_gaps(long: pd.DataFrame) -> None:
    gap = np.abs(np.log(long["open"] / long["close"].shift())).to_numpy()
    opens = (long["timestamps"].diff() > pd.Timedelta("1h")).to_numpy()
    usual = np.abs(np.log(long["close"] / long["open"])).median()
    assert np.median(gap[opens]) > 1.5 * usual
    assert np.nanmax(gap[~opens]) == 0.0  # within the day the next bar opens where the last one closed


def test_regimes_differ_in_volatility(inside: np.ndarray) -> None:
    weeks = np.abs(inside[: len(inside) // 390 * 390]).reshape(-1, 390).mean(axis=1)
    assert weeks.max() > 1.8 * weeks.min()


def test_volume_has_the_shape_of_the_day_and_of_the_week(long: pd.DataFrame) -> None:
    log_volume = np.log(long["volume"])
    by_time = log_volume.groupby(long["timestamps"].dt.time).mean().to_numpy()
    assert min(by_time[0], by_time[-1]) > by_time[30:48].mean() + 0.6  # both ends against the middle
    by_day = log_volume.groupby(long["timestamps"].dt.day_of_week).mean()
    assert by_day.idxmax() == 4
    size = np.abs(np.log(long["close"] / long["open"]))
    assert np.corrcoef(size, log_volume)[0, 1] > 0.2


def test_missing_bars() -> None:
    frame = sample_candles(3000, session="always", recipe=Recipe(missing=0.1))
    steps = frame["timestamps"].diff().dropna()
    assert len(frame) == 3000 and 0.06 < (steps > pd.Timedelta("5min")).mean() < 0.14


def test_a_market_is_several_instruments_of_their_own() -> None:
    market = sample_market(3, 200, seed=1, freq="1D")
    assert list(market) == ["SYM000", "SYM001", "SYM002"]
    returns = np.array([np.diff(np.log(frame["close"])) for frame in market.values()])
    assert np.abs(np.corrcoef(returns) - np.eye(3)).max() < 0.3
    pd.testing.assert_frame_equal(market["SYM001"], sample_market(2, 200, seed=1, freq="1D")["SYM001"])


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 0},
        {"freq": "sometimes"},
        {"start": "yesterdayish"},
        {"session": "night"},
        {"freq": "8h"},
        {"recipe": Recipe(reversion=1.5)},
    ],
)
def test_nonsense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError):  # seed and price: tests/test_limits.py
        sample_candles(**{"rows": 10, **options})  # type: ignore[arg-type]
