"""Timestamps in every form that files have."""

from __future__ import annotations

import pandas as pd
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.read import read_candles
from anytorch.forecast.candles.times import parse_times

WANT = pd.Timestamp("2024-01-31 09:30:00")
LINES = range(2, 100)


@pytest.mark.parametrize(
    "first",
    [
        *("2024-01-31 09:30:00", "2024-01-31T09:30", "2024/01/31 09:30", "31/01/2024 09:30", "01/31/2024 09:30:00"),
        *("31.01.2024 09:30", "01/31/2024 9:30 AM", "202401310930", "20240131093000"),
        *("1706693400", "1706693400000", 1706693400, 1706693400000000, 1706693400000000000),
    ],
)
def test_forms(first: object) -> None:
    parsed, _ = parse_times([first, first], LINES, "t", "f.csv")
    assert parsed[0] == WANT


def test_whole_dates_as_numbers() -> None:
    parsed, notes = parse_times([20240131, 20240201], LINES, "day", "f.csv")
    assert parsed[1] == pd.Timestamp("2024-02-01") and "YYYYMMDD" in notes[0]


def test_day_and_month_are_told_apart_by_how_time_runs() -> None:
    days = pd.bdate_range("2024-01-03", periods=8)
    parsed, notes = parse_times(days.strftime("%d/%m/%Y"), LINES, "t", "f.csv")
    assert list(parsed) == list(days) and "could be swapped" in notes[0]


def test_zones() -> None:
    parsed, notes = parse_times(["2024-01-31T09:30:00+08:00", "2024-01-31T09:35:00+08:00"], LINES, "t", "f.csv")
    assert parsed[0] == pd.Timestamp("2024-01-31 01:30", tz="UTC") and not notes
    parsed, notes = parse_times(["2024-03-30T09:30:00+01:00", "2024-04-01T09:30:00+02:00"], LINES, "t", "f.csv")
    assert str(parsed.dt.tz) == "UTC" and "several UTC offsets" in notes[0]
    with pytest.raises(InputError, match=r"line 3, column 't': some timestamps name a time zone and others do not"):
        parse_times(["2024-01-31T09:30:00Z", "2024-01-31T09:35:00"], LINES, "t", "f.csv")


@pytest.mark.parametrize(
    ("values", "line"),
    [(["2024-01-31", "soon"], 3), (["31/01/2024", "31/13/2024"], 3), ([1706693400, 12], 3), (["2024-01-31", ""], 3)],
)
def test_what_is_no_time(values: list[object], line: int) -> None:
    with pytest.raises(InputError, match=rf"f.csv, line {line}, column 't'"):
        parse_times(values, LINES, "t", "f.csv")


def test_epochs_are_moments_that_a_zone_converts() -> None:
    """15:30 in London is 10:30 in New York; without a zone the clock of UTC is shown, as files of exchanges have it."""
    frame = sample_candles(40, freq="1h", seed=2, session="always")
    wanted = pd.DatetimeIndex(frame["timestamps"], tz="UTC")
    frame["timestamps"] = wanted.as_unit("s").asi8
    (plain,), (converted,) = read_candles(frame), read_candles(frame, timezone="America/New_York")
    assert list(plain.frame["timestamps"]) == list(wanted.tz_localize(None))
    assert list(converted.frame["timestamps"]) == list(wanted.tz_convert("America/New_York"))
