"""What a user reads when a file or a table is not as it should be: the place, what is wrong, what to do, what changed."""

from __future__ import annotations

import gzip
import io
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.read import gaps, newest_parts, read_candles, read_many


@pytest.fixture
def frame() -> pd.DataFrame:
    return sample_candles(60, seed=2)


def text(frame: pd.DataFrame) -> bytes:
    return frame.to_csv(index=False).encode()


def refused(source: Any, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read_candles(source, **options)
    return caught.value


# --- a timestamp that is not there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[58], [59], list(range(60))])
@pytest.mark.parametrize("repair", [False, True])
def test_a_missing_time_is_named_in_every_kind_of_table(
    frame: pd.DataFrame, tmp_path: Path, rows: list[int], repair: bool
) -> None:
    frame.loc[rows, "timestamps"] = pd.NaT
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_feather(tmp_path / "a.feather")
    for source, first in (
        (tmp_path / "a.parquet", f"a.parquet, row {rows[0] + 1}"),
        (tmp_path / "a.feather", f"a.feather, row {rows[0] + 1}"),
        (text(frame), f"the data, line {rows[0] + 2}"),
        (frame, f"the table, row {rows[0]}"),
        (frame.assign(timestamps=frame["timestamps"].astype(object)), f"the table, row {rows[0]}"),
        (pl.from_pandas(frame), f"the table, row {rows[0]}"),
    ):
        assert refused(source, repair=repair).message == f"{first}, column 'timestamps': the timestamp is missing"
    indexed = frame.set_index("timestamps")
    assert f"row {rows[0]}, column 'timestamps': the timestamp is missing" in refused(indexed, repair=repair).message


# --- damaged files ---------------------------------------------------------------------------------------------------


def test_damaged_files(frame: pd.DataFrame, tmp_path: Path) -> None:
    packed = gzip.compress(text(frame))
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 0xFF
    frame.to_parquet(tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    for name, body, said in (
        ("a.csv.gz", packed[:100], "is a damaged gzip file: it ends too early"),
        ("b.csv.gz", bytes(broken), "is a damaged gzip file: "),
        ("c.csv.gz", packed[:-8] + b"\0" * 8, "is a damaged gzip file: "),
        ("d.parquet", whole[:3000], "is a damaged Parquet file: its end is missing"),
        ("e.parquet", b"\x07" + whole, "is not a Parquet file: its first bytes are wrong"),
        ("f.csv", bytes(range(256)) * 20, "is not in a known text encoding"),
        ("g.json", b'{"timestamps":{"0":1704187800000,"1":1704188100000}}', "is JSON, which is not supported"),
    ):
        (tmp_path / name).write_bytes(body)
        error = refused(tmp_path / name)
        assert error.message.startswith(f"{name} {said}") and error.hint


def test_long_lists_of_columns_are_cut_short() -> None:
    names = ",".join(f"column number {n} with a name that goes on and on" for n in range(3000))
    error = refused(f"{names}\n{','.join('1' * 3000)}\n".encode())
    assert len(str(error)) < 1000 and "and 2988 more" in error.message
    more = pd.DataFrame(0, index=range(30), columns=[f"feature {n}" for n in range(500)])
    wide = pd.concat([sample_candles(30), more], axis=1)
    assert all(len(note) < 1000 for note in read_candles(wide)[0].notes)


# --- text in other encodings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "encoding", "said"),
    [
        (["Datum", "Eröffnung", "Höchst", "Tief", "Schluß"], "cp1252", "Windows-1252"),
        (["Größe", "ÄÖÜ", "Été", "Año", "Últ"], "cp1252", "Windows-1252"),
        (["日期", "开盘", "最高", "最低", "收盘"], "gb18030", "GB 18030"),
        (["日期", "开盘价(元)", "最高价", "最低价", "收盘价"], "gbk", "GB 18030"),
        (["日期", "Eröffnung", "Höchst", "最低", "收盘"], "utf-8", None),
    ],
)
def test_the_encoding_is_guessed_and_told(frame: pd.DataFrame, names: list[str], encoding: str, said: str) -> None:
    ours = ("timestamps", "open", "high", "low", "close")
    body = frame[list(ours)].set_axis(names, axis=1).to_csv(index=False).encode(encoding)
    (series,) = read_candles(body, columns=dict(zip(ours, names, strict=True)))
    np.testing.assert_array_equal(series.frame["close"], frame["close"])
    told = [note for note in series.notes if "UTF-8" in note]
    assert told == ([] if said is None else told) and all(said in note for note in told) and bool(told) == bool(said)
    assert f"close = {names[4]!r}" in " ".join(series.notes)


def test_the_guess_is_told_when_the_columns_are_not_found() -> None:
    error = refused("Zeit;Eröffnung;Hoch;Tief;Schluss\n2024-01-01;1;2;0.5;1.5\n".encode("cp1252"))
    assert "'Eröffnung'" in error.message and "read as Windows-1252" in error.message


# --- clocks that change ----------------------------------------------------------------------------------------------


def test_times_that_do_not_exist_or_come_twice() -> None:
    hours = sample_candles(100, freq="1h", session="always", start="2024-03-30")
    error = refused(text(hours), timezone="Europe/Berlin")
    assert "line 28, column 'timestamps': 2024-03-31 02:00:00 does not exist in Europe/Berlin" in error.message
    assert "--timezone" in error.hint and "nonexistent" not in str(error)
    autumn = sample_candles(100, freq="1h", session="always", start="2024-10-26")
    error = refused(autumn, timezone="Europe/Berlin")
    assert "row 26, column 'timestamps': 2024-10-27 02:00:00 occurs twice in Europe/Berlin" in error.message
    assert "ambiguous" not in str(error)
    both = pd.date_range("2024-10-26", periods=100, freq="1h", tz="Europe/Berlin")
    (series,) = read_candles(autumn.assign(timestamps=both.tz_localize(None)), timezone="Europe/Berlin")
    assert list(series.frame["timestamps"]) == list(both)  # the hour is there twice, so it can be told
    assert str(series.rhythm) == "1 hour (100% of the steps)"
    assert "Mars/Base" not in zoneinfo.available_timezones()
    assert "timezone 'Mars/Base'" in refused(autumn, timezone="Mars/Base").message


# --- instruments -----------------------------------------------------------------------------------------------------


def test_an_instrument_without_a_name(frame: pd.DataFrame) -> None:
    named = frame.assign(symbol="ABC")
    named.loc[[7, 9], "symbol"] = ""
    assert refused(text(named)).message.startswith(
        "the data, line 9, column 'symbol': the instrument's name is missing"
    )
    named.loc[[7, 9], "symbol"] = None
    assert "row 7, column 'symbol': the instrument's name is missing (and 1 more)" in refused(named).message


def test_a_table_has_rows_and_arguments_and_the_name_it_was_given(frame: pd.DataFrame) -> None:
    frame.loc[20, "close"] = np.nan
    error = refused(frame, name="BTC")
    assert error.message == "BTC, row 20, column 'close': nan is not a number"
    assert "repair=True" in error.hint and "--repair" not in error.hint and "file" not in error.hint
    error = refused(frame.drop(columns="open"))
    assert "columns={'open': NAME}" in error.hint
    assert [one.name for one in read_candles(frame, name="BTC", repair=True)] == ["BTC"]


# --- what a repair did -----------------------------------------------------------------------------------------------


def test_a_repair_says_what_it_changed(frame: pd.DataFrame) -> None:
    before = frame.copy()
    frame.loc[20, "close"] = np.nan
    frame.loc[22, "open"] = -1.0
    frame.loc[24, "high"] = np.inf
    frame.loc[26, "volume"] = np.nan
    frame.loc[28, "amount"] = -5.0
    frame.loc[30, ["high", "low"]] = [9.0, 10.0]
    frame.loc[33, "timestamps"] = frame.loc[32, "timestamps"]
    (series,) = read_candles(text(frame), repair=True)
    said = {note.split("column ")[1].split(":")[0]: note for note in series.notes if note.startswith("repaired: ")}
    assert f"nan is not a number; it is now {before['close'][19]:.9g}, the close before" in said["'close'"]
    assert f"it is now {before['close'][21]:.9g}, the close before" in said["'open'"]
    assert "it is now 0" in said["'volume'"] and "volume times the mean price" in said["'amount'"]
    assert "the last row of each time is kept" in said["'timestamps'"]
    every = " ".join(series.notes)
    assert "the higher of open and close" in every and "high and low are swapped, the high is 10" in every
    first = before.copy()
    first.loc[[0, 1], "close"] = np.nan
    (series,) = read_candles(text(first), repair=True)
    assert len(series) == 58 and any("2 lines are left out, from 2 on" in note for note in series.notes)


def test_a_row_alone_behind_a_gap_is_not_dropped_in_silence(frame: pd.DataFrame) -> None:
    frame.loc[59, "timestamps"] += pd.Timedelta("400D")
    (series,) = read_candles(text(frame), repair=True)
    assert len(series) == 59
    (said,) = (note for note in series.notes if note.startswith("left out"))
    assert "line 61 (" in said and "the newest bar, stands alone after a gap of 400 days" in said
    longer = sample_candles(500)
    longer.loc[499, "timestamps"] += pd.Timedelta("400D")
    longer.loc[0, "timestamps"] -= pd.Timedelta("400D")
    (series,) = read_candles(text(longer), repair=True)
    assert sum(note.startswith("left out") for note in series.notes) == 2 and len(series) == 498
    apart = sample_candles(4).assign(
        timestamps=pd.to_datetime(["2020-01-01", "2021-01-01", "2023-01-01", "2026-01-01"])
    )
    assert len(read_candles(apart, repair=True)[0]) == 4  # a rhythm of years, not gaps


def test_what_is_said_of_the_whole_is_said_with_the_part_that_is_forecast(frame: pd.DataFrame) -> None:
    frame.loc[10, "close"] = np.nan
    frame.loc[40:, "timestamps"] += pd.Timedelta("400D")
    found = read_candles(text(frame), repair=True, name="BTC/USDT")
    assert [one.name for one in found] == ["BTC/USDT", "BTC/USDT/2"]
    (newest,) = newest_parts(found)
    assert len(newest) == 20 and any(note.startswith("repaired: ") for note in newest.notes)


def test_a_slash_in_a_name_does_not_make_parts(frame: pd.DataFrame) -> None:
    pairs = pd.concat([frame.assign(symbol=name) for name in ("BTC/USDT", "BTC/EUR")])
    assert [one.name for one in newest_parts(read_candles(pairs, repair=True))] == ["BTC/USDT", "BTC/EUR"]


def test_a_short_part_keeps_the_hours_of_its_market() -> None:
    candles = sample_candles(78 * 8 + 30)
    candles.loc[78 * 7 :, "timestamps"] += pd.Timedelta("70D")
    newest = newest_parts(read_candles(candles, repair=True))[0]
    assert len(newest) == 78 + 30 and str(newest.rhythm).endswith("09:30 to 15:55, Mon to Fri")


# --- what else is understood -----------------------------------------------------------------------------------------


def test_newest_first_is_read_from_the_end(frame: pd.DataFrame) -> None:
    (series,) = read_candles(text(frame.iloc[::-1]))
    assert list(series.frame["timestamps"]) == list(frame["timestamps"])
    assert any("the newest rows come first" in note for note in series.notes)
    broken = frame.copy()
    broken.loc[59, "close"] = np.nan  # the first line of its file
    assert "line 2, column 'close'" in refused(text(broken.iloc[::-1])).message


@pytest.mark.parametrize("layout", ["%m/%d/%y %I:%M %p", "%d/%m/%y %H:%M", "%d.%m.%y %H:%M:%S"])
def test_years_of_two_digits(frame: pd.DataFrame, layout: str) -> None:
    (series,) = read_candles(text(frame.assign(timestamps=frame["timestamps"].dt.strftime(layout))))
    assert list(series.frame["timestamps"]) == list(frame["timestamps"])


def test_other_tables(frame: pd.DataFrame) -> None:
    days = sample_candles(40, freq="1D", session="always")
    periods = days.set_index(pd.PeriodIndex(days["timestamps"], freq="D")).drop(columns="timestamps")
    assert list(read_candles(periods)[0].frame["timestamps"]) == list(days["timestamps"])
    for source in (
        pl.from_pandas(frame).lazy(),
        pa.Table.from_pandas(frame),
        frame.to_dict("list"),
        io.StringIO(frame.to_csv(index=False)),
        io.BytesIO(text(frame)),
    ):
        np.testing.assert_array_equal(read_candles(source)[0].frame["close"], frame["close"])
    brackets = frame.rename(columns=lambda name: f"[{name}]")
    np.testing.assert_array_equal(read_candles(text(brackets))[0].frame["close"], frame["close"])


def test_an_open_file_has_its_name(frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_csv(tmp_path / "abc.csv", index=False)
    with (tmp_path / "abc.csv").open() as words, (tmp_path / "abc.csv").open("rb") as body:
        assert [read_candles(words)[0].name, read_candles(body)[0].name] == ["abc", "abc"]


def test_a_file_that_is_named_twice_is_read_once(frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_csv(tmp_path / "a.csv", index=False)
    (series,) = read_many([tmp_path / "a.csv", tmp_path])
    assert "more than once" in series.notes[0]


def test_seconds_are_whole() -> None:
    assert str(sample_candles(50, freq="1s")["timestamps"].iloc[-1]) == "2024-01-02 09:30:49"


def test_two_huge_gaps_in_a_short_file_are_both_found() -> None:
    frame = sample_candles(60, freq="1h", seed=2, session="always")
    later = pd.Series(pd.to_timedelta([0] * 20 + [100] * 20 + [300] * 20, unit="D"))
    frame["timestamps"] += later
    assert gaps(frame["timestamps"]) == [20, 40]


def test_only_what_is_chosen_is_read_and_only_its_newest_part(frame: pd.DataFrame) -> None:
    early, late = frame[:30], frame[30:].assign(timestamps=frame["timestamps"][30:] + pd.Timedelta(days=800))
    cut = pd.concat([early, late]).assign(symbol="CUT")
    wrong = frame.assign(symbol="WRONG", close=-1.0)
    both = pd.concat([wrong, cut])
    asked: list[list[str]] = []

    def choose(names: list[str]) -> list[str]:
        asked.append(names)
        return ["CUT"]

    (part,) = read_candles(both, repair=True, choose=choose, newest=True)
    assert asked == [["WRONG", "CUT"]]
    whole = newest_parts(read_candles(cut, repair=True))[0]
    assert part.name == whole.name == "CUT/2" and part.frame.equals(whole.frame) and part.rhythm == whole.rhythm


def test_instruments_keep_their_rows_and_their_order(frame: pd.DataFrame) -> None:
    mixed = pd.concat([frame.assign(symbol=name, close=frame["close"] + add) for name, add in (("B", 0.0), ("A", 1.0))])
    mixed = mixed.sort_values("timestamps", kind="stable")
    found = read_candles(mixed, repair=True)
    assert [one.name for one in found] == ["B", "A"]
    for one, add in zip(found, (0.0, 1.0), strict=True):
        assert one.frame["close"].tolist() == (frame["close"] + add).tolist()
