"""Sizes that the published scaling cannot deal with: said or refused, and mended on request."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.tables import FIELDS as COLUMNS
from anytorch.forecast.inputs import scale_columns

PRICES = ("open", "high", "low", "close")


def small(frame: Any, factor: float) -> Any:
    """The same series of a coin that costs a millionth, and still trades for the same amount."""
    return frame.assign(**{name: frame[name] * factor for name in PRICES})


def test_the_published_scaling_to_the_last_bit(minutes: Any) -> None:
    values = minutes[list(COLUMNS)].to_numpy()
    x = values.astype(np.float32)
    mean, scale = np.mean(x, axis=0), np.std(x, axis=0) + 1e-5
    for rescale in (False, True):  # a column of a usual size is left alone
        found = scale_columns(values, COLUMNS, rescale=rescale, where="it")
        assert found.normal.dtype == np.float32 and not found.warnings
        np.testing.assert_array_equal(found.normal, (x - mean) / scale)
        np.testing.assert_array_equal(found.mean, mean)
        np.testing.assert_array_equal(found.scale, scale)


def test_small_prices_are_told_and_named(minutes: Any, predictor: Any, caplog: pytest.LogCaptureFixture) -> None:
    made, history = predictor("a"), small(minutes.iloc[:40], 1e-7)
    with caplog.at_level(logging.WARNING, logger="anytorch"):
        told = made.forecast(history, pred_len=4, top_k=1, verbose=False)
    (words,) = told.warnings
    assert words.startswith("the history, columns open, high, low, close: the values vary by only ")
    assert "the model sees 0.0" in words and "rescale=True" in words and words in caplog.text
    # … and the warning is right: the published numbers are far from anything the price has been.
    assert (abs(told.mean["close"] / history["close"].iloc[-1] - 1) > 1).any()


def test_rescaled_they_are_forecast_like_others(minutes: Any, predictor: Any, caplog: pytest.LogCaptureFixture) -> None:
    made, history = predictor("a"), minutes.iloc[:40]
    wanted = made.predict(history, pred_len=6, top_k=1, verbose=False)
    for factor in (1e-7, 1e-12):
        with caplog.at_level(logging.WARNING, logger="anytorch"):
            found = made.predict(small(history, factor), pred_len=6, top_k=1, verbose=False, rescale=True)
        assert not caplog.text
        np.testing.assert_allclose(found["close"] / factor, wanted["close"], rtol=1e-3)
        np.testing.assert_array_equal(found["volume"], wanted["volume"])


def test_a_constant_column_is_no_small_one(minutes: Any) -> None:
    values = minutes[list(COLUMNS)].to_numpy().copy()
    values[:, 4] = 0.1  # whose mean is not 0.1 to the last bit
    for rescale in (False, True):
        found = scale_columns(values, COLUMNS, rescale=rescale, where="it")
        assert not found.warnings and np.abs(found.normal[:, 4]).max() < 1e-2


def test_huge_values_are_refused_or_rescaled(minutes: Any, predictor: Any) -> None:
    made, history = predictor("a"), minutes.iloc[:40]
    huge = history.assign(amount=history["amount"] * 1e26)
    with pytest.raises(
        InputError, match=r"the history, column 'amount': values up to .*e\+\d\d are too large"
    ) as caught:
        made.predict(huge, pred_len=3, verbose=False)
    assert "rescale=True" in str(caught.value)
    found = made.predict(huge, pred_len=3, top_k=1, verbose=False, rescale=True)
    wanted = made.predict(history, pred_len=3, top_k=1, verbose=False)
    np.testing.assert_allclose(found["amount"] / 1e26, wanted["amount"], rtol=1e-3)
    with pytest.raises(
        InputError, match=r"too large to compute with in float32\nhint: give the column in a larger unit$"
    ):
        made.predict(history.assign(amount=history["amount"] * 1e36), pred_len=3, verbose=False, rescale=True)


@pytest.mark.parametrize("largest", [1e37, 3e38, 1e154, 1e300, 1e308])
def test_what_leaves_no_headroom_is_refused(minutes: Any, predictor: Any, largest: float) -> None:
    history = minutes.iloc[:40]
    huge = history.assign(amount=history["amount"] / history["amount"].max() * largest)
    with pytest.raises(InputError, match=r"column 'amount': values up to .* are too large to compute with in float32"):
        predictor("a").predict(huge, pred_len=3, top_k=1, verbose=False, rescale=True)


def test_near_the_end_of_float32_forecasts_are_finite(minutes: Any, predictor: Any) -> None:
    history = minutes.iloc[:40]
    huge = history.assign(amount=history["amount"] / history["amount"].max() * 1e34)
    found = predictor("a").predict(
        huge, pred_len=3, sample_count=20, seed=1, non_negative_volume=True, verbose=False, rescale=True
    )
    assert np.isfinite(found.to_numpy()).all() and found["amount"].max() > 1e32


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (np.full(8, 2.0**130), "too large"),  # no deviation at all
        (np.array([1e308, -1e308] * 4), "too large"),  # … nor one that is a number
        (np.arange(1.0, 9.0) * 1e-170, "too small"),  # … nor one that float64 can square
        (np.arange(1.0, 9.0) * 5e-324, "too small"),
    ],
)
def test_sizes_whose_deviation_says_nothing(column: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=f"it, column 'x': values up to .* are {said} to compute with in float32"):
        scale_columns(column[:, None], ["x"], rescale=True, where="it")


def test_a_constant_of_any_size_that_fits_is_itself() -> None:
    found = scale_columns(np.full((8, 1), 2.0**110), ["x"], rescale=True, where="it")
    assert found.mean == np.float32(2.0**110) and not found.normal.any()


def test_the_noise_of_a_computation_is_no_movement() -> None:
    values = 100 + 1e-12 * np.random.default_rng(0).normal(size=(40, 1))
    for rescale in (False, True):
        found = scale_columns(values, ["x"], rescale=rescale, where="it")
        assert not found.warnings and found.mean == 100 and not found.normal.any()


def test_how_bad_it_is_is_said_in_measure() -> None:
    wave = np.sin(np.arange(40.0))[:, None]
    wave /= wave.std()
    (little,) = scale_columns(wave * 8e-5, ["x"], rescale=False, where="it").warnings
    (much,) = scale_columns(wave * 8e-6, ["x"], rescale=False, where="it").warnings
    assert (
        "the model sees 88.89% of their movement, and the forecast may be a little worse for it (rescale=True" in little
    )
    assert "the model sees 44.44% of their movement, and the forecast cannot be trusted (rescale=True" in much
