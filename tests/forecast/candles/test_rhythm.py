"""The times of the bars to come: whatever the market's hours are, and whichever bars are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.rhythm import future_times, rhythm_of

BUSINESS = range(5)
US, CHINA = [("09:30", "15:59")], [("09:30", "11:29"), ("13:00", "14:59")]


def trading(freq: str, days: int, hours: Sequence[tuple[str, str]], weekdays: Sequence[int] = BUSINESS) -> pd.Index:
    every = pd.date_range("2023-01-01", periods=days)
    parts = [
        pd.date_range(f"{day:%F} {first}", f"{day:%F} {last}", freq=freq)
        for day in every[every.day_of_week.isin(weekdays)]
        for first, last in hours
    ]
    return pd.DatetimeIndex(np.concatenate(parts))


def currencies(freq: str, days: int) -> pd.Index:
    """Sunday 22:00 to Friday 22:00."""
    times = pd.date_range("2023-01-01", f"{pd.Timestamp('2023-01-01') + pd.Timedelta(days=days):%F}", freq=freq)
    place = times - times.normalize() + pd.to_timedelta(times.day_of_week, unit="D")
    return times[(place < pd.Timedelta("4D22h")) | (place >= pd.Timedelta("6D22h"))]


def days_on(weekdays: Sequence[int], days: int) -> pd.Index:
    every = pd.date_range("2023-01-01", periods=days)
    return every[every.day_of_week.isin(weekdays)]


def new_york(times: pd.Index) -> pd.Index:
    """The same times as a file in UTC has them: no zone is known, and from spring to autumn all is an hour earlier."""
    return times.tz_localize("America/New_York").tz_convert("UTC").tz_localize(None)


# All times of a market, and how many of them a history has at least, so that its hours and days can be known.
MARKETS: dict[str, tuple[Callable[[], pd.Index], int]] = {
    "round the clock, 1min": (lambda: pd.date_range("2023-01-05 07:03", periods=1440 * 6, freq="1min"), 24),
    "round the clock, 5min": (lambda: pd.date_range("2023-01-05 07:00", periods=288 * 24, freq="5min"), 24),
    "round the clock, 1h": (lambda: pd.date_range("2023-01-05 07:00", periods=24 * 60, freq="1h"), 24),
    "round the clock, 1D": (lambda: pd.date_range("2023-01-05", periods=200, freq="1D"), 24),
    "an exchange, 1min": (lambda: trading("1min", 24, US), 390 * 4),
    "an exchange, 5min": (lambda: trading("5min", 60, US), 78 * 4),
    "an exchange, 1h": (lambda: trading("1h", 120, US), 7 * 8),
    "an exchange, 1D": (lambda: pd.bdate_range("2023-01-04", periods=300), 12),
    "currencies, 1D": (lambda: days_on([6, 0, 1, 2, 3, 4], 400), 40),
    "Monday, Wednesday, Friday": (lambda: days_on([0, 2, 4], 400), 14),
    "with lunch, 5min": (lambda: trading("5min", 60, CHINA), 48 * 4),
    "with lunch, 1h": (lambda: trading("1h", 200, CHINA), 4 * 12),
    "Sunday to Thursday, 5min": (lambda: trading("5min", 60, [("10:00", "14:59")], [6, 0, 1, 2, 3]), 60 * 16),
    "currencies, 5min": (lambda: currencies("5min", 50), 288 * 12),
    "weeks": (lambda: pd.date_range("2020-01-03", periods=150, freq="W-FRI"), 8),
    "months": (lambda: pd.date_range("2015-01-01", periods=90, freq="MS"), 16),
    "ends of months": (lambda: pd.date_range("2015-01-01", periods=90, freq="ME"), 16),
    "last trading days of months": (lambda: pd.date_range("2015-01-01", periods=90, freq="BME"), 16),
    "quarters": (lambda: pd.date_range("2005-01-01", periods=60, freq="QS"), 16),
}
ALL = {name: make() for name, (make, _) in MARKETS.items()}


@pytest.mark.parametrize("name", MARKETS)
@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_the_future_is_the_markets_whatever_bars_are_missing(name: str, data: st.DataObject) -> None:
    times, least = ALL[name], MARKETS[name][1]
    rows = data.draw(st.integers(least, len(times) - 1), label="rows")
    missing = data.draw(st.sampled_from([0.0, 0.01, 0.1]), label="missing")
    random = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    kept = random.random(rows) >= missing
    kept[[0, -1]] = True
    horizon = min(data.draw(st.sampled_from([1, 30, 200]), label="horizon"), len(times) - rows)
    assert list(future_times(times[:rows][kept], horizon)) == list(times[rows : rows + horizon])


@pytest.mark.parametrize("name", [name for name in MARKETS if "month" not in name and name != "quarters"])
@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_a_short_history_never_ends_an_open_session(name: str, data: st.DataObject) -> None:
    """Whatever is missing, outages included: where the market goes on, the next bar is one step later."""
    times = ALL[name]
    step = pd.Series(times).diff().mode()[0]
    stop = data.draw(st.integers(3, min(MARKETS[name][1] + 40, len(times) - 1)), label="stop")
    start = data.draw(st.integers(0, stop - 3), label="start")
    part = times[start:stop]
    random = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    kept = random.random(len(part)) >= 0.05
    outage = int(random.integers(len(part)))
    kept[outage : outage + len(part) // 20] = False
    kept[-1] = True
    part = part[kept]
    if len(part) > 2 and rhythm_of(part).step == step and times[stop] - part[-1] == step:
        assert future_times(part, 1)[0] == part[-1] + step


@pytest.mark.parametrize(
    "name", ["round the clock, 5min", "an exchange, 1min", "an exchange, 5min", "with lunch, 5min"]
)
@pytest.mark.parametrize("filled", [0.7, 0.3])
def test_thin_trading_is_no_pause(name: str, filled: float) -> None:
    times = ALL[name]
    rows = len(times) - 200
    kept = np.random.default_rng(5).random(rows) < filled
    kept[-1] = True
    assert list(future_times(times[:rows][kept], 200)) == list(times[rows:])


def test_what_has_no_rhythm_has_no_pauses() -> None:
    random = np.random.default_rng(6)
    seconds = np.unique(random.integers(0, 30 * 86400, 20_000))
    times = pd.DatetimeIndex(np.datetime64("2024-01-01", "s") + seconds.astype("timedelta64[s]"))
    assert not rhythm_of(times).pauses


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_future_always_runs_forwards(data: st.DataObject) -> None:
    """Whatever the times are, and in whatever zone: what comes next is later, each time once."""
    seconds = data.draw(st.lists(st.sampled_from([60, 300, 3600, 86400, 259200, 604800]), min_size=1, max_size=120))
    zone = data.draw(st.sampled_from([None, "UTC", "Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe"]))
    times = pd.DatetimeIndex(np.datetime64("2023-10-01", "s") + np.cumsum([0, *seconds]).astype("timedelta64[s]"))
    times = times if zone is None else times.tz_localize("UTC").tz_convert(zone)
    ahead = future_times(times, 50)
    assert len(ahead) == 50 and ahead.is_unique and ahead.is_monotonic_increasing and ahead[0] > times[-1]
    assert str(ahead.tz) == str(times.tz) and str(rhythm_of(times))


# --- single cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 64, 120, 300, 2000])
def test_one_missing_bar_makes_no_night(rows: int) -> None:
    times = pd.date_range("2024-01-01", periods=2001, freq="5min").delete(1980)
    part = times[-rows:]
    assert list(future_times(part, 3)) == list(pd.date_range(part[-1], periods=4, freq="5min")[1:])
    assert not rhythm_of(part).pauses


def test_two_days_say_nothing_about_weekends() -> None:
    times = pd.date_range("2024-01-01", periods=2000, freq="1min").delete(1000)  # Monday and Tuesday
    assert not rhythm_of(times).pauses and str(rhythm_of(times)) == "1 minute (99.9% of the steps)"


def test_one_night_is_not_enough_and_two_are() -> None:
    times = trading("5min", 30, US)
    one_night, two_nights = times[78 + 20 : 2 * 78 + 50], times[78 + 20 : 3 * 78 + 50]
    assert future_times(one_night, 100)[-1] == one_night[-1] + 100 * pd.Timedelta("5min")
    assert list(future_times(two_nights, 100)) == list(times[3 * 78 + 50 :][:100])


def test_the_rhythm_of_the_whole_history_is_used_for_its_end() -> None:
    times = sample_candles(300)["timestamps"]  # Tuesday to Friday, 14:55
    alone, known = future_times(times[-64:], 120), future_times(times[-64:], 120, rhythm_of(times))
    assert alone[-1] == pd.Timestamp("2024-01-06 00:55")  # with no night in sight it goes on
    assert list(known) == list(sample_candles(420)["timestamps"][300:])


def test_a_weekend_that_was_not_seen_is_assumed_for_an_exchange_alone() -> None:
    rhythm = rhythm_of(sample_candles(300)["timestamps"])
    assert rhythm.assumed and str(rhythm).endswith("Mon to Fri (assumed: there is no weekend in the data)")
    assert not rhythm_of(sample_candles(600)["timestamps"]).assumed
    open_on_saturdays = trading("5min", 30, US, range(7))
    assert not rhythm_of(open_on_saturdays[:300]).assumed  # from Sunday on
    assert not rhythm_of(open_on_saturdays[78 : 78 * 6 + 10]).assumed  # up to Saturday
    round_the_clock = pd.date_range("2024-01-02", periods=800, freq="5min")
    assert not rhythm_of(round_the_clock).pauses


def test_one_weekend_is_enough_and_a_holiday_beside_it_is_no_rule() -> None:
    days = pd.bdate_range("2024-01-03", periods=30)
    assert list(future_times(days[:6], 8)) == list(days[6:14])
    assert list(future_times(days[:3], 5)) == [days[2] + pd.Timedelta(days=n) for n in range(1, 6)]  # none was seen
    without_monday = days[:8].delete(3)  # the only one so far
    assert list(future_times(without_monday, 10)) == list(days[8:18])
    bars = trading("5min", 60, US)
    monday = bars[bars.normalize() == "2023-01-09"]
    kept = bars[: 78 * 9 + 20].difference(monday)
    assert list(future_times(kept, 400)) == list(bars[78 * 9 + 20 :][:400])


def test_a_day_that_was_missed_once_is_not_closed() -> None:
    times = pd.date_range("2024-01-01", periods=288 * 8, freq="5min")
    assert not rhythm_of(times[times.day_of_week != 2]).pauses  # the only Wednesday
    weeks = pd.date_range("2024-01-01", periods=288 * 36, freq="5min")
    assert str(rhythm_of(weeks[weeks.day_of_week != 2])).endswith(", Thu 00:00 to Tue 23:55")


def test_a_few_fridays_missing_in_a_thin_history_are_no_rule() -> None:
    days = pd.bdate_range("2024-01-01", periods=19)
    assert future_times(days[days.day_of_week != 4][:14], 4)[2] == pd.Timestamp("2024-01-26")  # a Friday


def test_fridays_last_bars_missing_once_do_not_end_every_friday() -> None:
    bars = trading("5min", 60, US)
    friday = bars.get_indexer([pd.Timestamp("2023-01-06 15:50"), pd.Timestamp("2023-01-06 15:55")])
    kept = bars[: 78 * 9 + 5].delete(friday)
    assert list(future_times(kept, 200)) == list(bars[78 * 9 + 5 :][:200])


def test_hours_that_changed_are_forgotten() -> None:
    """An exchange's file in UTC: from March on all is an hour earlier."""
    bars = trading("5min", 160, US)
    local = new_york(bars)
    rows = int(np.searchsorted(bars, pd.Timestamp("2023-05-10 12:00")))
    assert list(future_times(local[:rows], 300)) == list(local[rows : rows + 300])


@pytest.mark.parametrize("change", ["2023-03-12", "2023-11-05"])
@pytest.mark.parametrize("since", range(12))
def test_a_change_of_clocks_loses_no_weekday_of_daily_bars(change: str, since: int) -> None:
    days = pd.bdate_range("2022-09-01", "2024-03-01")
    rows = int(np.searchsorted(days, pd.Timestamp(change))) + since
    times = new_york(days)[:rows]
    ahead = future_times(times, 15)
    assert list(ahead.normalize()) == list(days[rows : rows + 15])
    assert set(ahead - ahead.normalize()) == {times[-1] - times[-1].normalize()}


def test_a_last_daily_bar_at_another_time_loses_no_weekday() -> None:
    days = pd.bdate_range("2024-01-01", periods=30)
    for clock in ("00:00:01", "15:00", "17:00", "23:10"):
        last = days[20] + pd.Timedelta(clock if clock.count(":") == 2 else clock + ":00")
        times = (days[:20] + pd.Timedelta("16h")).append(pd.DatetimeIndex([last]))
        assert list(future_times(times, 9)) == list(days[21:30] + (last - days[20]))


@pytest.mark.parametrize("change", ["2023-03-26", "2023-10-29"])
def test_daily_bars_that_begin_at_midnight_in_london(change: str) -> None:
    """In UTC they begin at 00:00 in winter and at 23:00 of the day before in summer."""
    days = pd.bdate_range("2023-01-02", "2023-12-29")
    utc = days.tz_localize("Europe/London").tz_convert("UTC").tz_localize(None)
    for since in (1, 3, 6, 20):
        rows = int(np.searchsorted(days, pd.Timestamp(change))) + since
        assert list(future_times(utc[:rows], 15)) == list(utc[rows : rows + 15])


def test_one_day_of_the_week_without_a_daily_bar() -> None:
    times = days_on([6, 0, 1, 2, 3, 4], 1500)
    assert str(rhythm_of(times)).endswith(", Sun to Fri")
    assert list(future_times(times[:1000], 30)) == list(times[1000:1030])
    two_saturdays = times[:16]
    assert not rhythm_of(two_saturdays).pauses
    no_wednesdays = days_on([0, 1, 3, 4, 5, 6], 1500)
    assert str(rhythm_of(no_wednesdays)).endswith(", Thu to Tue")
    assert not rhythm_of(no_wednesdays[:30]).pauses  # five weeks are enough for a Saturday only


@pytest.mark.parametrize("rows", [300, 400, 512, 1000])
def test_currencies_end_on_friday_where_they_always_ended(rows: int) -> None:
    times = currencies("1h", 90)
    end = int(np.searchsorted(times, pd.Timestamp("2023-03-24 21:00"))) + 1
    assert list(future_times(times[end - rows : end], 30)) == list(times[end : end + 30])
    assert str(rhythm_of(times[end - rows : end])).endswith(", Sun 22:00 to Fri 21:00")


def test_fridays_that_ended_at_different_hours_end_none() -> None:
    times = currencies("1h", 90)
    end = int(np.searchsorted(times, pd.Timestamp("2023-03-24 12:00")))
    late = pd.DatetimeIndex(["2023-03-17 22:00", "2023-03-17 23:00"])
    assert str(rhythm_of(times[end - 300 : end].union(late))).endswith(", Sun 22:00 to Fri 23:00")
    one_weekend = times[end - 150 : end]
    assert str(rhythm_of(one_weekend)).endswith(", Sun 22:00 to Fri 23:00")


@pytest.mark.parametrize("change", ["2023-03-12", "2023-11-05"])
@pytest.mark.parametrize(("freq", "bars_a_day"), [("1h", 7), ("5min", 78)])
@pytest.mark.parametrize("missing", [0.0, 0.02])
def test_new_hours_count_three_days_after_a_change_of_clocks(
    change: str, freq: str, bars_a_day: int, missing: float
) -> None:
    sessions = trading(freq, 365, US)
    utc = new_york(sessions)
    half_day = (sessions.normalize() == pd.Timestamp(change) + pd.Timedelta(days=19)) & (sessions.hour >= 13)
    kept = (np.random.default_rng(3).random(len(utc)) >= missing) & ~half_day
    soon = [] if missing else [(3, 0), (3, 2), (4, 0)]  # three days with a first and a last bar are needed
    for days, bars in (*soon, (5, 1), (10, 0), (17, 0), (22, 3), (26, 0)):
        rows = int(np.searchsorted(sessions, pd.Timestamp(change))) + days * bars_a_day + bars
        kept[rows - 1] = True
        expected = list(utc[rows : rows + 12 * bars_a_day])
        assert list(future_times(utc[:rows][kept[:rows]], len(expected))) == expected, (days, bars)


def test_a_day_that_opens_and_closes_an_hour_late_changes_nothing() -> None:
    sessions = trading("1h", 90, US)
    late = sessions.normalize() == "2023-03-09"
    times = pd.DatetimeIndex(np.where(late, sessions + pd.Timedelta("1h"), sessions))
    for day in ("2023-03-10", "2023-03-13", "2023-03-14", "2023-03-20"):
        rows = int(np.searchsorted(sessions, pd.Timestamp(day)))
        assert list(future_times(times[:rows], 30)) == list(sessions[rows : rows + 30])


def test_half_days_in_a_row_are_no_new_hours() -> None:
    sessions = trading("1h", 90, US)
    short = sessions.normalize().isin(pd.to_datetime(["2023-03-07", "2023-03-08", "2023-03-09"])) & (sessions.hour > 12)
    rows = int(np.searchsorted(sessions, pd.Timestamp("2023-03-10"))) + 1  # the next session has begun
    assert list(future_times(sessions[:rows][~short[:rows]], 30)) == list(sessions[rows : rows + 30])


def test_a_week_whose_bar_is_on_thursday_moves_no_other() -> None:
    weeks = pd.date_range("2023-01-06", periods=40, freq="W-FRI")
    holiday = weeks[:20][:-1].append(pd.DatetimeIndex([weeks[19] - pd.Timedelta(days=1)]))
    assert list(future_times(holiday, 10)) == list(weeks[20:30])
    every_other = weeks[::2][:9].append(pd.DatetimeIndex([weeks[18] - pd.Timedelta(days=1)]))
    assert list(future_times(every_other, 5)) == list(weeks[20:30:2])


def test_bars_of_some_days_keep_to_their_weekdays_or_to_their_step() -> None:
    times = days_on([0, 2, 4], 200)
    assert str(rhythm_of(times)) == "2 days (67% of the steps), Mon, Wed, Fri"
    moved = times[:40].delete(-1).append(pd.DatetimeIndex([times[39] + pd.Timedelta(days=1)]))  # a holiday
    assert list(future_times(moved, 6).normalize()) == list(times[40:46])
    for step in range(2, 7):
        steady = pd.date_range("2023-01-02", periods=120, freq=f"{step}D")
        for rows in (2, 5, 9, 12, 30, 90):
            assert list(future_times(steady[:rows], 20)) == list(steady[rows : rows + 20])


def test_words() -> None:
    assert str(rhythm_of(ALL["with lunch, 5min"])).endswith(", 09:30 to 11:25 and 13:00 to 14:55, Mon to Fri")
    assert str(rhythm_of(ALL["currencies, 5min"])).endswith(", Sun 22:00 to Fri 21:55")
    assert str(rhythm_of(ALL["Sunday to Thursday, 5min"])).endswith(", 10:00 to 14:55, Sun to Thu")
    assert str(rhythm_of(ALL["an exchange, 1D"])) == "1 day (80% of the steps), Mon to Fri"
    assert str(rhythm_of(ALL["round the clock, 1h"])) == "1 hour (100% of the steps)"
    assert str(rhythm_of(ALL["quarters"])) == "3 months"
    assert str(rhythm_of(trading("5min", 30, US, range(7)))).endswith("steps), 09:30 to 15:55")


@pytest.mark.parametrize(
    ("freq", "session"),
    [("5min", None), ("1h", None), ("1h", "always"), ("1D", None), ("1D", "always"), ("W-FRI", None)],
)
@pytest.mark.parametrize("rows", [400, 437])
def test_the_future_is_what_the_generator_would_have_made(freq: str, session: str | None, rows: int) -> None:
    times = sample_candles(rows + 120, freq=freq, session=session)["timestamps"]
    assert list(future_times(times[:rows], 120)) == list(times[rows:])


def test_days_of_the_month_that_not_every_month_has() -> None:
    times = pd.DatetimeIndex([pd.Timestamp("2023-01-30") + pd.DateOffset(months=n) for n in range(30)])
    assert list(future_times(times[:14], 16)) == list(times[14:])  # ends in February


def test_holidays_and_missing_bars_do_not_break_the_rhythm() -> None:
    times = sample_candles(78 * 20 + 30)["timestamps"]
    kept = times[~times.dt.date.isin([times[200].date()])].drop(index=[5, 900, 901])
    assert list(future_times(kept, 100)) == list(sample_candles(78 * 20 + 130)["timestamps"][-100:])
    daily = pd.bdate_range("2024-01-01", periods=60).delete([10, 31])
    assert list(future_times(daily, 5)) == list(pd.bdate_range(daily[-1], periods=6)[1:])


def test_a_change_of_clocks_skips_no_bar_and_repeats_none() -> None:
    times = pd.date_range("2024-03-29 00:00", periods=78, freq="1h", tz="Europe/Berlin")
    assert list(future_times(times[:48], 30)) == list(times[48:])
    back = pd.date_range("2024-10-25 00:00", periods=78, freq="1h", tz="Europe/Berlin")
    assert list(future_times(back[:48], 30)) == list(back[48:])
    days = pd.date_range("2024-03-20", periods=40, freq="1D", tz="Europe/Berlin")
    assert list(future_times(days[:9], 31)) == list(days[9:])
    sessions = trading("1h", 120, US).tz_localize("America/New_York")
    rows = int(np.searchsorted(sessions, pd.Timestamp("2023-03-08", tz="America/New_York")))
    assert list(future_times(sessions[:rows], 60)) == list(sessions[rows : rows + 60])


def test_a_pause_that_ends_in_the_hour_that_comes_twice() -> None:
    hours = [("00:00", "02:14"), ("02:45", "23:59")]
    rhythm = rhythm_of(trading("5min", 12, hours, range(7)))
    assert str(rhythm).endswith("steps), 02:45 to 02:10")
    last = pd.Timestamp("2024-10-27 02:10").tz_localize("Europe/Berlin", ambiguous=False)  # the second time
    ahead = future_times(pd.DatetimeIndex([last - pd.Timedelta("5min"), last]), 2, rhythm)
    assert [str(time) for time in ahead] == ["2024-10-27 02:45:00+01:00", "2024-10-27 02:50:00+01:00"]


def test_one_timestamp_has_no_rhythm() -> None:
    with pytest.raises(InputError, match="too few to find the step"):
        rhythm_of(pd.DatetimeIndex(["2024-01-01"]))
    with pytest.raises(InputError, match="horizon=0"):
        future_times(pd.DatetimeIndex(["2024-01-01", "2024-01-02"]), 0)


def test_the_calendar_ends() -> None:
    years = pd.date_range("2000-01-01", periods=20, freq="YS")
    with pytest.raises(InputError, match="10000 bars of 12 months after 2019-01-01 00:00:00 go beyond the end"):
        future_times(years, 10_000)


def test_times_out_of_order_have_the_rhythm_of_those_in_order() -> None:
    times = pd.bdate_range("2024-01-01", periods=40)
    assert rhythm_of(times[::-1]) == rhythm_of(times.append(times)) == rhythm_of(times)


@pytest.mark.parametrize("horizon", ["3", 2.5, None, True])
def test_a_horizon_is_a_whole_number(horizon: Any) -> None:
    with pytest.raises(InputError, match="is not a whole number"):
        future_times(pd.date_range("2024-01-01", periods=9, freq="h"), horizon)


@pytest.mark.parametrize("years", [(1, 1), (1600, 1700), (2024, 9998), (9999, 9999)])
def test_years_that_cannot_be_counted_are_refused(years: tuple[int, int]) -> None:
    """Nanoseconds wrap around there: steps would be of any size, and run backwards."""
    times = pd.DatetimeIndex(np.array([f"{years[0]:04d}-01-01", f"{years[1]:04d}-06-01"], "datetime64[s]"))
    with pytest.raises(InputError, match="years from 1678 to 2261"):
        rhythm_of(times)
