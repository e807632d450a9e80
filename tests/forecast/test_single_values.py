"""A series of single values: from a file, a table or a list; and a history that is longer than what the model sees."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.columns import value_column
from anytorch.forecast.candles.read import read_candles
from anytorch.forecast.candles.single import as_candles, is_single

pd = pytest.importorskip("pandas")
pytest.importorskip("torch")

VALUES = [round(20 * float(np.sin(row / 5)) + row / 10, 3) for row in range(-40, 60)]  # negative ones, too
DAYS = pd.date_range("2024-01-01", periods=len(VALUES), freq="D")
OPTIONS: dict[str, Any] = {"pred_len": 3, "sample_count": 2, "seed": 1, "verbose": False}


def body(header: str, rows: list[str]) -> bytes:
    return "\n".join([*([header] if header else []), *rows, ""]).encode()


DATED = [f"{day.date()},{value}" for day, value in zip(DAYS, VALUES, strict=True)]


@pytest.mark.parametrize(
    ("data", "dated"),
    [
        (body("date,sales", DATED), True),
        (body("ds,y", DATED), True),
        (body("date,value", DATED), True),  # which is an amount beside prices
        (body("timestamp;price", [row.replace(",", ";") for row in DATED]), True),
        (body("", DATED), True),
        (body("temperature", list(map(str, VALUES))), False),
        (body("", list(map(str, VALUES))), False),
    ],
)
def test_a_file_of_one_column(data: bytes, dated: bool) -> None:
    (series,) = read_candles(data)
    frame = series.frame
    assert is_single(frame) and np.allclose(frame["close"], VALUES)
    assert np.allclose(frame["open"].iloc[1:], VALUES[:-1]) and (frame["high"] >= frame["low"]).all()
    assert frame["timestamps"].iloc[0] == (DAYS[0] if dated else pd.Timestamp("2000-01-03"))
    said = " ".join(series.notes)
    assert "close" in said and ("each row counts as a day" in said) == (not dated)


def test_which_column_is_meant() -> None:
    assert value_column({"timestamps": "d", "close": "x"}, ["d", "x", "y"]) == "x"
    assert value_column({"timestamps": "d", "amount": "value"}, ["d", "value"]) == "value"
    assert value_column({"timestamps": "d"}, ["d", "x", "y"]) is None
    assert value_column({"open": "o", "close": "c"}, ["o", "c"]) is None
    with pytest.raises(InputError, match="has no column for open, high, low, close") as found:
        read_candles(body("date,humidity,pressure", [f"{row},5" for row in DATED]))
    assert "single values: name them: --columns close=NAME" in found.value.hint
    (one,) = read_candles(body("date,humidity,pressure", [f"{row},5" for row in DATED]), columns={"close": "humidity"})
    assert np.allclose(one.frame["close"], VALUES)
    with pytest.raises(InputError, match="no separator"):
        read_candles(b"hello\nworld\n")
    with pytest.raises(InputError, match="is not above 0"):  # a price is one, though
        read_candles(body("date,open,high,low,close", [f"{day.date()},1,1,1,{row}" for row, day in enumerate(DAYS)]))


def test_python_takes_a_table_a_series_a_list(predictor: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = predictor("a")
    table = pd.DataFrame({"timestamps": DAYS, "sales": VALUES})
    wanted = made.predict(table, **OPTIONS)
    assert list(wanted.columns) == ["open", "high", "low", "close", "volume", "amount"] and len(wanted) == 3
    assert wanted.index[0] == DAYS[-1] + pd.Timedelta(days=1) and np.isfinite(wanted["close"]).all()
    candles = as_candles(pd.DataFrame({"timestamps": DAYS, "close": VALUES}))
    for other in (
        table.set_index("timestamps"),
        pd.Series(VALUES, index=DAYS),
        candles,
        table.rename(columns={"sales": "Close"}),
    ):
        pd.testing.assert_frame_equal(made.predict(other, **OPTIONS), wanted, check_freq=False)
    pd.testing.assert_frame_equal(made.predict(VALUES, DAYS, **OPTIONS), wanted, check_freq=False)
    assert "no timestamps" not in caplog.text
    for counted in (VALUES, np.array(VALUES), np.array(VALUES, np.float32)):
        assert made.predict(counted, **OPTIONS).index[0] == pd.Timestamp("2000-01-03") + pd.Timedelta(days=len(VALUES))
    assert "each row counts as a day" in caplog.text
    with pytest.raises(InputError, match=r"row 4 .*column 'close'"):
        made.predict([1.0, 2.0, 3.0, 4.0, float("nan"), 6.0], **OPTIONS)


def test_a_missing_value_is_told_in_its_own_row() -> None:
    """Not in the next, whose open it would be; and a column of nothing by the one column that was given."""
    file = body("date,sales", [f"2024-01-{day:02},{'' if day == 5 else day}" for day in range(1, 13)])
    with pytest.raises(InputError, match=r"line 6, column 'close': nan is not a number\n") as told:
        read_candles(file)
    assert "--repair" in told.value.hint
    (mended,) = read_candles(file, repair=True)
    assert list(mended.frame["close"][3:6]) == [4.0, 4.0, 6.0] and list(mended.frame["open"][3:6]) == [3.0, 4.0, 4.0]
    assert [note for note in mended.notes if "repaired" in note] == [
        "repaired: the data, line 6, column 'close': nan is not a number; it is now 4, the close before"
    ]
    nothing = body("date,sales", [f"2024-01-{day:02}," for day in range(1, 13)])
    with pytest.raises(InputError, match=r"line 2, column 'close': nan is not a number \(and 11 more\)"):
        read_candles(nothing)
    with pytest.raises(InputError, match=r"column 'close': 100% of the values are missing, more than a repair"):
        read_candles(nothing, repair=True)


def test_rows_that_the_model_does_not_see_are_told(
    predictor: Any, minutes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = predictor("a", max_context=32)
    seen, long = 32, minutes.iloc[:52]
    with caplog.at_level(logging.WARNING):
        found = made.forecast(long, **OPTIONS)
    words = f"{len(long):,} rows and the model sees the last {seen:,}"
    assert words in caplog.text and any(words in warning for warning in found.warnings)
    caplog.clear()
    cut = made.forecast(long, lookback=seen, **OPTIONS)
    assert not cut.warnings and "sees the last" not in caplog.text
    pd.testing.assert_frame_equal(cut.mean, made.predict(long.tail(seen), **OPTIONS), check_freq=False)
    assert not cut.mean.equals(found.mean), "the scale of all rows moves the forecast"
