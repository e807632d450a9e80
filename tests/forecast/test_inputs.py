"""What people hand in: every kind of table and timestamp, and a clear word for what cannot be used."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.tables import FIELDS as COLUMNS
from anytorch.forecast.inputs import read_series


def read(table: Any, x: Any = None, y: Any = None, pred_len: int | None = 5, **options: Any) -> Any:
    return read_series(table, x, y, pred_len, where="it", checks=options.pop("checks", True))


@pytest.fixture
def frame(minutes: Any) -> pd.DataFrame:
    return minutes.iloc[:40].copy()


def test_every_kind_of_table_is_the_same_series(frame: Any) -> None:
    values, times = frame[list(COLUMNS)], frame["timestamps"]
    wanted = read(values, times)
    for table, x in (
        (frame, None),  # a column of times
        (frame.set_index("timestamps"), None),  # a DatetimeIndex
        (values, pd.DatetimeIndex(times)),
        (values, list(times)),
        (values, times.to_numpy()),
        (values, times.astype(str).tolist()),
        (values.to_numpy(), times),
        (polars.DataFrame({name: frame[name].to_numpy() for name in frame.columns}), None),
        (polars.DataFrame({name: frame[name].to_numpy() for name in COLUMNS}), polars.Series(times.to_numpy())),
        (frame[["timestamps", *reversed(COLUMNS)]], None),  # in any order
        (frame.rename(columns=str.capitalize), None),
        (frame.rename(columns=str.upper).set_index("TIMESTAMPS"), None),
        (frame.to_dict("list"), None),
        (polars.from_pandas(frame).lazy(), None),
        (pyarrow.Table.from_pandas(frame), None),
        (values.set_index(pd.PeriodIndex(times, freq="min")), None),
        (values, pd.PeriodIndex(times, freq="min")),
        (values, times.dt.to_period("min")),
        (frame.assign(timestamps=times.dt.to_period("min")), None),
        (values, (time for time in times)),
        (values, map(str, times)),
        (values, (int(time.timestamp()) for time in times)),
    ):
        found = read(table, x)
        np.testing.assert_array_equal(found.normal, wanted.normal)
        np.testing.assert_array_equal(found.stamp, wanted.stamp)
        assert list(found.future) == list(wanted.future)


def test_a_table_that_is_none(frame: Any) -> None:
    with pytest.raises(InputError, match="it is not a table"):
        read({"open": [1.0, 2.0], "close": [1.0]})
    with pytest.raises(InputError, match="index, row 3: the timestamp is missing"):
        read(frame.assign(timestamps=frame["timestamps"].mask(frame.index == 3)).set_index("timestamps"))


@pytest.mark.parametrize("nothing", [[], (), {}, pd.DataFrame(), np.zeros((0, 6)), np.zeros(0), pd.Series(dtype=float)])
def test_a_history_of_nothing_is_told_by_its_rows(nothing: Any) -> None:
    with pytest.raises(InputError, match="it has 0 rows; at least 2 are needed"):
        read(nothing)


def test_a_history_of_one_row(frame: Any) -> None:
    for one in (frame.iloc[:1], [1.0], frame.iloc[:1].to_dict("list")):
        with pytest.raises(InputError, match="it has 1 row; at least 2 are needed"):
            read(one)


def test_several_tables_where_one_is_meant(frame: Any) -> None:
    with pytest.raises(InputError, match="it is a list of DataFrames, not one table") as told:
        read([frame, frame])
    assert "predict_batch" in told.value.hint


def test_a_column_of_nothing_is_named(frame: Any) -> None:
    for name in COLUMNS:
        with pytest.raises(
            InputError, match=rf"it, row 0 \(.*\), column '{name}': nan is not a number \(and 39 more\)"
        ):
            read(frame.assign(**{name: np.nan}))
    with pytest.raises(InputError, match=r"row 0 .*column 'open': nan is not a number \(and 239 more\)"):
        read(frame.assign(**dict.fromkeys(COLUMNS, np.nan)))


def test_missing_volume_and_amount(frame: Any) -> None:
    """As published: no volume makes both zero, even where there is an amount; a missing amount is volume times price."""
    bare = read(frame.drop(columns=["volume", "amount"]))
    assert (bare.normal[:, 4:] == 0).all()
    without_volume = read(frame.drop(columns="volume"))
    assert (without_volume.normal[:, 4:] == 0).all()
    made = frame.drop(columns="amount")
    made["amount"] = made["volume"] * made[["open", "high", "low", "close"]].mean(axis=1)
    np.testing.assert_allclose(read(frame.drop(columns="amount")).normal, read(made).normal, atol=1e-5)


def test_the_future_continues_the_rhythm(frame: Any) -> None:
    found = read(frame, pred_len=3)
    assert len(found.future) == 3 and found.future[0] > frame["timestamps"].iloc[-1]
    days = pd.DataFrame(
        {name: np.linspace(1, 2, 30) for name in COLUMNS}, index=pd.bdate_range("2024-01-01", periods=30)
    )
    assert [str(day.date()) for day in read(days, pred_len=2).future] == ["2024-02-12", "2024-02-13"]


def test_time_zones(frame: Any) -> None:
    zone = "America/New_York"
    aware = frame.assign(timestamps=frame["timestamps"].dt.tz_localize(zone))
    found = read(aware)
    np.testing.assert_array_equal(found.stamp, read(frame).stamp)  # the clock on the wall
    assert str(found.future.tz) == zone
    columns = {name: aware[name].to_numpy() for name in COLUMNS}
    utc = aware["timestamps"].dt.tz_convert("UTC").dt.tz_localize(None)
    times = polars.Series(utc.to_numpy()).dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    np.testing.assert_array_equal(read(polars.DataFrame({"timestamps": times, **columns})).stamp, found.stamp)
    bare_future = pd.date_range("2025-01-01", periods=5, freq="5min")
    with pytest.raises(InputError, match="time zone is America/New_York, that of y_timestamp not given"):
        read(aware, y=bare_future)
    with pytest.raises(InputError, match="that of y_timestamp UTC"):
        read(aware, y=bare_future.tz_localize("UTC"))
    with pytest.raises(InputError, match="these are not timestamps"):
        read(frame[list(COLUMNS)], [*frame["timestamps"][:-1], pd.Timestamp("2025-01-01", tz="UTC")])


def broken(frame: Any, row: int, column: str, value: Any) -> Any:
    made = frame.copy()
    made[column] = made[column].astype(object)
    made.loc[made.index[row], column] = value
    return made


@pytest.mark.parametrize(
    ("row", "column", "value", "words"),
    [
        (7, "close", np.nan, r"row 7 \(2024.*column 'close': nan is not a number"),
        (3, "volume", np.inf, "row 3 .*column 'volume': inf is not a number"),
        (9, "high", "abc", "row 9, column 'high': 'abc' is not a number"),
        (5, "low", 0.0, "row 5 .*column 'low': the price is 0.0, which is not above 0"),
        (5, "open", -3.0, "row 5 .*column 'open': the price is -3.0"),
        (6, "volume", -1.0, "row 6 .*column 'volume': -1.0 is negative"),
        (4, "high", 0.5, "row 4 .*column 'high': 0.5 is below the low"),
    ],
)
def test_bad_values_are_named(frame: Any, row: int, column: str, value: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(broken(frame, row, column, value))


def test_bad_times_are_named(frame: Any) -> None:
    swapped = frame.copy()
    swapped["timestamps"] = [*frame["timestamps"][:10], *frame["timestamps"][11:9:-1], *frame["timestamps"][12:]]
    with pytest.raises(InputError, match=r"row 11 .*column 'timestamps': .* comes after a later timestamp"):
        read(swapped)
    twice = frame.copy()
    twice.loc[8, "timestamps"] = twice.loc[7, "timestamps"]
    with pytest.raises(InputError, match=r"row 8 .*column 'timestamps': .* occurs twice"):
        read(twice)
    gone = frame.copy()
    gone.loc[2, "timestamps"] = pd.NaT
    with pytest.raises(InputError, match="row 2: the timestamp is missing"):
        read(gone)
    with pytest.raises(InputError, match="it has 40 rows and 39 timestamps"):
        read(frame, frame["timestamps"][:-1])
    with pytest.raises(InputError, match="is not after the last row of the history"):
        read(frame, y=frame["timestamps"][-5:])
    with pytest.raises(InputError, match="no timestamps: x_timestamp is missing"):
        read(frame[list(COLUMNS)])


def test_what_is_forecast_without_checks(frame: Any) -> None:
    """As published: zero prices, disorder and negative volume are computed with; NaN never is."""
    for bad in (broken(frame, 5, "low", 0.0), broken(frame, 6, "volume", -1.0), frame.iloc[::-1]):
        assert np.isfinite(read(bad, y=pd.date_range("2025-01-01", periods=5), checks=False).normal).all()
    with pytest.raises(InputError, match="row 7"):
        read(broken(frame, 7, "close", np.nan), checks=False)


def test_wrong_shapes(frame: Any) -> None:
    with pytest.raises(InputError, match=r"lacks the column\(s\) close; it has 'timestamps', 'open'"):
        read(frame.drop(columns="close"))
    with pytest.raises(InputError, match=r"it has 1 row; at least 2 are needed"):
        read(frame.iloc[:1], pred_len=1)
    with pytest.raises(InputError, match=r"it is a ndarray of shape \(3, 2\)"):
        read(np.zeros((3, 2)))
    with pytest.raises(InputError, match="it is a str"):
        read("prices.csv")
    with pytest.raises(InputError, match="pred_len is 3 and y_timestamp has 4 entries"):
        read(frame, y=pd.date_range("2025-01-01", periods=4), pred_len=3)
    with pytest.raises(InputError, match="pass pred_len or y_timestamp"):
        read(frame, pred_len=None)
    assert len(read(frame, y=pd.date_range("2025-01-01", periods=4), pred_len=None).future) == 4
    with pytest.raises(ValueError, match="pred_len is 3"):  # what the published code raises
        read(frame, y=pd.date_range("2025-01-01", periods=4), pred_len=3)


def test_a_constant_series_is_its_own_forecast(frame: Any, predictor: Any, caplog: pytest.LogCaptureFixture) -> None:
    frame[list(COLUMNS)] = 12.5
    with caplog.at_level(logging.WARNING):
        found = predictor("a").predict(frame, pred_len=3, seed=0)
    assert "all prices are 12.5" in caplog.text
    np.testing.assert_allclose(found.to_numpy(), 12.5, atol=1e-3)


def test_a_huge_gap_is_said(frame: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The model sees rows, not the time between them."""
    frame["timestamps"] = [*frame["timestamps"][:20], *(frame["timestamps"][20:] + pd.Timedelta(days=900))]
    with caplog.at_level(logging.WARNING):
        read(frame)
    assert "a gap far beyond the usual step" in caplog.text and "row 20" in caplog.text


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("kind", [list, np.array, pd.Series, polars.Series, pd.Index])
def test_epochs_are_read_by_their_size(unit: str, kind: Any, frame: Any, caplog: pytest.LogCaptureFixture) -> None:
    """pandas alone takes every whole number for nanoseconds: milliseconds would all be in January 1970."""
    values, times = frame[list(COLUMNS)], frame["timestamps"]
    epochs = (times - pd.Timestamp(0)) // pd.Timedelta(1, unit=unit)
    with caplog.at_level(logging.WARNING, logger="anytorch"):
        found = read(values, kind(epochs.tolist()))
    np.testing.assert_array_equal(found.stamp, read(values, times).stamp)
    words = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
    assert (unit == "ns") == (caplog.text == "")
    assert unit == "ns" or f"it, x_timestamp: timestamps such as {epochs[0]} are read as {words[unit]}" in caplog.text


def test_numbers_that_are_no_times(frame: Any) -> None:
    values = frame[list(COLUMNS)]
    with pytest.raises(InputError, match="it, x_timestamp: numbers such as 0 are not timestamps\nhint: give datetimes"):
        read(values, list(range(len(frame))))
    with pytest.raises(InputError, match="it, x_timestamp, row 3: the timestamp is missing"):
        read(values, [1.7e9 + 60 * row if row != 3 else np.nan for row in range(len(frame))])
    with pytest.raises(InputError, match="it, x_timestamp: these are not timestamps"):
        read(values, True)


def test_epochs_of_the_future(frame: Any) -> None:
    ahead = [int(frame["timestamps"].iloc[-1].timestamp() * 1000) + 300_000 * (step + 1) for step in range(5)]
    found = read(frame, y=pd.Series(ahead))
    assert list(found.future) == [pd.Timestamp(moment, unit="ms") for moment in ahead]


def test_the_times_to_forecast_run_forwards(frame: Any) -> None:
    ahead = list(pd.date_range(frame["timestamps"].iloc[-1], periods=6, freq="5min")[1:])
    twice, back = [*ahead[:3], ahead[2], ahead[4]], [*ahead[:2], ahead[3], ahead[2], ahead[4]]
    for wrong in (twice, back, list(pd.DatetimeIndex(back).tz_localize("UTC"))):
        zone = getattr(wrong[0], "tz", None)
        history = frame if zone is None else frame.assign(timestamps=frame["timestamps"].dt.tz_localize(zone))
        with pytest.raises(InputError, match=r"it, y_timestamp, entry 3: .* is not after the one before it"):
            read(history, y=wrong)
        assert len(read(history, y=wrong, checks=False).future) == 5


def test_a_column_that_is_there_twice(frame: Any) -> None:
    twice = pd.concat([frame, frame[["close"]]], axis=1)
    with pytest.raises(InputError, match="it has 2 columns called 'close'"):
        read(twice)
    with pytest.raises(InputError, match="it has 2 columns called 'timestamps'"):
        read(pd.concat([frame, frame[["timestamps"]]], axis=1))
