"""Timestamps in every form that files have, and the ones that come next."""

from __future__ import annotations

import pandas as pd
import pytest

from anytorch.engines.candles.generate import sample_candles
from anytorch.engines.candles.times import future_times, parse_times, rhythm_of
from anytorch.errors import InputError

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


@pytest.mark.parametrize(
    ("freq", "session"),
    [("5min", None), ("1h", None), ("1h", "always"), ("1D", None), ("1D", "always"), ("W-FRI", None)],
)
@pytest.mark.parametrize("rows", [400, 437])
def test_the_future_is_what_the_generator_would_have_made(freq: str, session: str | None, rows: int) -> None:
    times = sample_candles(rows + 120, freq=freq, session=session)["timestamps"]
    assert list(future_times(times[:rows], 120)) == list(times[rows:])


def test_months_have_no_fixed_length() -> None:
    times = pd.date_range("2023-01-31", periods=20, freq="ME")
    assert list(future_times(times[:12], 8)) == list(times[12:])


def test_holidays_and_missing_bars_do_not_break_the_rhythm() -> None:
    times = sample_candles(78 * 20)["timestamps"]
    kept = times[~times.dt.date.isin([times[200].date()])].drop(index=[5, 900, 901])
    rhythm = rhythm_of(kept)
    assert rhythm.step == pd.Timedelta("5min") and len(rhythm.slots) == 78 and rhythm.weekdays == (0, 1, 2, 3, 4)
    assert "5 minutes" in str(rhythm) and "09:30 to 15:55" in str(rhythm)
    ahead = future_times(kept, 100)
    assert ahead[0] == times.iloc[-1] + pd.Timedelta("5min") if times.iloc[-1].hour < 15 else ahead[0].hour == 9
    daily = pd.bdate_range("2024-01-01", periods=60).delete([10, 31])
    assert list(future_times(daily, 5)) == list(pd.bdate_range(daily[-1], periods=6)[1:])


def test_the_future_keeps_its_zone_across_a_change_of_clocks() -> None:
    times = pd.date_range("2024-03-29 00:00", periods=48, freq="1h", tz="Europe/Berlin")
    ahead = future_times(times, 30)
    assert str(ahead.tz) == "Europe/Berlin" and len(ahead) == 30 and ahead.is_monotonic_increasing


def test_one_timestamp_has_no_rhythm() -> None:
    with pytest.raises(InputError, match="cannot be told"):
        rhythm_of(pd.DatetimeIndex(["2024-01-01"]))
    with pytest.raises(InputError, match="horizon=0"):
        future_times(pd.DatetimeIndex(["2024-01-01", "2024-01-02"]), 0)
