"""Files as people have them: what is guessed is told, what is wrong is named by line and column, what is mended is said."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.columns import guess_columns, parse_given
from anytorch.forecast.candles.generate import sample_candles, sample_market
from anytorch.forecast.candles.read import read_candles, read_many


@pytest.fixture
def frame() -> pd.DataFrame:
    return sample_candles(60, seed=2)


def text(frame: pd.DataFrame, **options: object) -> bytes:
    return frame.to_csv(index=False, **options).encode()


def test_what_the_generator_writes_is_read_back(frame: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_csv(tmp_path / "abc.csv", index=False)
    frame.to_parquet(tmp_path / "abc.parquet")
    frame.to_feather(tmp_path / "abc.feather")
    (tmp_path / "abc.csv.gz").write_bytes(gzip.compress(text(frame)))
    for name in ("abc.csv", "abc.parquet", "abc.feather", "abc.csv.gz"):
        (series,) = read_candles(tmp_path / name)
        assert series.name == "abc" and len(series) == 60
        np.testing.assert_array_equal(series.frame[["open", "amount"]], frame[["open", "amount"]])
        assert (series.frame["timestamps"] == frame["timestamps"]).all()
        assert series.notes == (f"frequency: {series.rhythm}",)


def test_tables_in_memory(frame: pd.DataFrame) -> None:
    indexed = frame.set_index("timestamps")
    for table in (frame, indexed, pl.from_pandas(frame)):
        (series,) = read_candles(table)
        np.testing.assert_array_equal(series.frame["close"], frame["close"])


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["Date", "Open", "High", "Low", "Close", "Volume", "Amount"], {}),
        (["t", "o", "h", "l", "c", "v", "amt"], {"sep": ";"}),
        (["Open_Time", "1. open", "2. high", "3. low", "4. close", "5. volume", "Quote Volume"], {"sep": "\t"}),
        (["日期", "开盘", "最高", "最低", "收盘", "成交量", "成交额"], {"sep": "|"}),
    ],
)
def test_columns_and_separators_are_guessed_and_told(
    frame: pd.DataFrame, names: list[str], options: dict[str, str]
) -> None:
    (series,) = read_candles(text(frame.set_axis(names, axis=1), **options))
    np.testing.assert_array_equal(series.frame["amount"], frame["amount"])
    told = " / ".join(series.notes)
    assert f"close = {names[4]!r}" in told
    assert ("separated by" in told) == bool(options)


def test_date_and_time_in_two_columns(frame: pd.DataFrame) -> None:
    split = frame.assign(date=frame.timestamps.dt.strftime("%Y.%m.%d"), time=frame.timestamps.dt.strftime("%H:%M"))
    split["date"] = split["date"].str.replace(".", "-")
    (series,) = read_candles(text(split.drop(columns="timestamps")))
    assert (series.frame["timestamps"] == frame["timestamps"]).all()


def test_no_header_and_binances_klines(frame: pd.DataFrame) -> None:
    (series,) = read_candles(text(frame, header=False))
    np.testing.assert_array_equal(series.frame["close"], frame["close"])
    assert any("no header line" in note for note in series.notes)
    epoch = frame["timestamps"].astype("datetime64[ms]").astype("int64")
    klines = pd.concat([epoch, frame.iloc[:, 1:6], epoch + 299999, frame["amount"] * 2, *[epoch * 0] * 4], axis=1)
    (series,) = read_candles(text(klines, header=False))
    np.testing.assert_allclose(series.frame["amount"], frame["amount"] * 2)
    assert (series.frame["timestamps"] == frame["timestamps"]).all()


def test_numbers_as_people_write_them(frame: pd.DataFrame) -> None:
    (series,) = read_candles(text(frame, sep=";", decimal=","))
    np.testing.assert_allclose(series.frame["close"], frame["close"])
    assert any("decimal comma" in note for note in series.notes)
    written = frame.assign(close=[f"${value:,.2f}" for value in frame["close"]], volume="1.5M")
    (series,) = read_candles(text(written))
    np.testing.assert_allclose(series.frame["close"], frame["close"])
    assert (series.frame["volume"] == 1.5e6).all()
    thousands = frame.assign(volume=[f"{1_234_000 + n:,}" for n in range(60)])
    assert read_candles(text(thousands))[0].frame["volume"].iloc[1] == 1_234_001


def test_many_instruments_in_one_file_and_many_files(tmp_path: Path) -> None:
    market = sample_market(3, 40, freq="1D")
    stacked = pd.concat([frame.assign(ticker=name) for name, frame in market.items()])
    stacked.to_csv(tmp_path / "all.csv", index=False)
    found = read_candles(tmp_path / "all.csv")
    assert [series.name for series in found] == list(market)
    np.testing.assert_array_equal(found[2].frame["close"], market["SYM002"]["close"])
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        market["SYM000"].to_csv(tmp_path / folder / "x.csv", index=False)
    assert [series.name for series in read_many([tmp_path / "a", tmp_path / "b" / "x.csv"])] == ["x", "x#2"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no"):
        read_many([tmp_path / "empty"])


def test_standard_input(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(text(frame))

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("sys.stdin", Stdin())
    assert len(read_candles("-")[0]) == 60


def test_a_zone_is_put_on_or_converted(frame: pd.DataFrame) -> None:
    (series,) = read_candles(frame, timezone="America/New_York")
    assert str(series.frame["timestamps"].dt.tz) == "America/New_York"
    assert series.frame["timestamps"].dt.hour.iloc[0] == 9
    with pytest.raises(InputError, match="timezone 'Mars/Base'"):
        read_candles(frame, timezone="Mars/Base")


# --- what is wrong ---------------------------------------------------------------------------------------------------


def broken(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Row 20 of the frame (line 22 of its file) is broken."""
    frame = frame.copy()
    if kind == "missing":
        frame.loc[20, "close"] = np.nan
    elif kind == "infinite":
        frame.loc[20, "high"] = np.inf
    elif kind == "zero":
        frame.loc[20, "low"] = 0.0
    elif kind == "negative":
        frame.loc[20, "open"] = -3.0
    elif kind == "volume":
        frame.loc[20, "volume"] = -1.0
    elif kind == "upside-down":
        frame.loc[20, "low"] -= 0.01
        frame.loc[20, ["high", "low"]] = frame.loc[20, ["low", "high"]].to_numpy() * 1.0
    elif kind == "unsorted":
        frame = frame.iloc[[*range(19), 20, 19, *range(21, 60)]]
    elif kind == "duplicate":
        frame.loc[20, "timestamps"] = frame.loc[19, "timestamps"]
    elif kind == "gap":
        frame.loc[20:, "timestamps"] += pd.Timedelta("100D")
    elif kind == "constant":
        frame[["open", "high", "low", "close"]] = 5.0
    return frame


SAID = {
    "missing": r"line 22, column 'close': nan is not a number",
    "infinite": r"line 22, column 'high': inf is not a number",
    "zero": r"line 22, column 'low': the price is 0.0, which is not above 0",
    "negative": r"line 22, column 'open': the price is -3.0",
    "volume": r"line 22, column 'volume': -1.0 is negative",
    "upside-down": r"line 22, column 'high': .* is below the low",
    "unsorted": r"line 22, column 'timestamps': .* comes after a later timestamp",
    "duplicate": r"line 22, column 'timestamps': .* occurs twice",
    "gap": r"line 22, column 'timestamps': .* a gap far beyond the usual step",
    "constant": r"line 2, column 'close': all prices are 5, in every row",
}


@pytest.mark.parametrize("kind", SAID)
def test_what_is_wrong_is_named_by_line_and_column(frame: pd.DataFrame, kind: str) -> None:
    with pytest.raises(InputError, match=SAID[kind]) as caught:
        read_candles(text(broken(frame, kind)))
    assert "--repair" in caught.value.hint


@pytest.mark.parametrize("kind", SAID)
def test_repair(frame: pd.DataFrame, kind: str) -> None:
    found = read_candles(text(broken(frame, kind)), repair=True)
    if kind == "gap":
        assert [len(series) for series in found] == [20, 40] and found[1].name.endswith("/2")
        return
    (series,) = found
    mended = series.frame
    assert mended["timestamps"].is_monotonic_increasing and mended["timestamps"].is_unique
    assert np.isfinite(mended.drop(columns="timestamps").to_numpy()).all()
    assert (mended[["open", "high", "low", "close"]] > 0).all().all() and (mended["high"] >= mended["low"]).all()
    assert len(mended) == (59 if kind == "duplicate" else 60)
    assert any("repaired: " in note for note in series.notes) == (kind != "constant")
    untouched = frame.drop(index=[19, 20])
    if kind not in ("constant", "duplicate", "unsorted"):
        np.testing.assert_array_equal(mended.drop(index=[19, 20])["close"], untouched["close"])
    if kind == "missing":
        assert mended["close"][20] == frame["close"][19]
    if kind == "unsorted":
        assert list(mended["timestamps"]) == list(frame["timestamps"])


def test_too_much_is_not_made_up(frame: pd.DataFrame) -> None:
    frame.loc[10:40, "close"] = np.nan
    with pytest.raises(InputError, match=r"line 12, column 'close': 52% of the prices"):
        read_candles(text(frame), repair=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\xff\xfe", "is empty"),
        (b"hello", "no separator"),
        (b"timestamps,open,high,low,close\n", "a header but no rows"),
        (b"timestamps,open,high,low\n2024-01-01,1,2,3\n", "no column for close"),
        (b"when,open,high,low,close\n2024-01-01,1,2,3,4\n", "no column for timestamps"),
        (b"timestamps,open,high,low,close\n2024-01-01,1,2,1,1\n2024-01-02,1,x,1,1\n", r"line 3, column 'high': 'x'"),
        (b"timestamps,open,high,low,close\n2024-01-01,1,2,1,1\n\nsoon,1,2,1,1\n", r"line 4, column 'timestamps'"),
        (b"timestamps,open,high,low,close\n2024-01-01,1,2,1,1\n", r"1 usable row"),
        (b"timestamps,open,high,low,close\n2024-01-01,1,2,1,1,9,9\n,,,,\n1,2\n", "separators|columns|fields|line"),
        (b"PAR1 is not all there is to it", "is a damaged Parquet file: its end is missing"),
    ],
)
def test_wrong_files(body: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_candles(body)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_candles(tmp_path / "nothing.csv")


def test_columns_can_be_named() -> None:
    names = ["when", "Eröffnung", "Hoch", "Tief", "Schluss"]
    given = parse_given("timestamps=when,open=Eröffnung,high=Hoch,low=Tief,close=Schluss")
    assert guess_columns(names, given=given).of["close"] == "Schluss"
    with pytest.raises(InputError, match="did you mean 'Schluss'"):
        guess_columns(names, given={**given, "close": "Schlus"})
    with pytest.raises(InputError, match="unknown field 'end'"):
        guess_columns(names, given={"end": "Schluss"})
    with pytest.raises(InputError, match="not FIELD=NAME"):
        parse_given("open")
    two = guess_columns(["date", "open", "high", "low", "close", "last", "volume"])
    assert two.of["close"] == "close" and two.ignored == ("last",) and "not from 'last'" in two.notes[0]


@pytest.mark.parametrize("source", [[], ["a.csv", "b.csv"], None, 5])
def test_a_source_that_is_none(source: object) -> None:
    with pytest.raises(InputError, match=f"the source is a {type(source).__name__}, not a file's path"):
        read_candles(source)
