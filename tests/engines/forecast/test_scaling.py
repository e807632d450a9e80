"""Sizes that the published scaling cannot deal with: said or refused, and mended on request."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from anytorch.engines.forecast.inputs import COLUMNS
from anytorch.engines.forecast.scaling import scale_columns
from anytorch.errors import InputError

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
        told = made.predict(history, pred_len=4, top_k=1, return_samples=True, verbose=False)
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
