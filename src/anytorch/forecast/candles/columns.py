"""Which column of a table is which: by name, by what the caller says, or by the usual order where there is no header."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from anytorch.errors import InputError, did_you_mean
from anytorch.forecast.candles.tables import ALL, FIELDS, PRICES, Origin, listed
from anytorch.values import dataclass

COUNTED = "there are no timestamps: each row counts as a day, from 2000-01-03 on"


def told_of_values(name: str) -> str:
    return f"one column of values, {name!r}: each bar opens at the value before it, and its forecast is `close`"


def value_column(found: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The one column of values in a table without open, high and low; None if there are several or none. Pure.

    `found` maps our names to the table's, as far as they were recognised; a single `value` may have passed for an amount.
    """
    if any(field in found for field in ("open", "high", "low")):
        return None
    if "close" in found:
        return found["close"]
    rest = [
        name for name in names if name not in {found.get(field) for field in ("timestamps", "date", "time", "symbol")}
    ]
    return rest[0] if len(rest) == 1 else None


# In order of preference; compared without case, spaces and punctuation ("1. open", "Open_Time"). The Chinese names are
# those of akshare and of most exchanges' downloads.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "timestamps": (
        *("timestamps", "timestamp", "datetime", "opentime", "datetimeutc", "timestamputc", "ts", "t", "unix", "epoch"),
        *("unixtime", "unixtimestamp", "timestampms", "candlebegintime", "begin", "日期时间", "index", "unnamed0"),
    ),
    "date": ("date", "tradedate", "tradingday", "day", "dt", "ds", "日期", "交易日期"),
    "time": ("time", "tradetime", "timeofday", "时间"),
    "open": ("open", "o", "openprice", "1open", "first", "openbid", "bidopen", "开盘", "开盘价"),
    "high": ("high", "h", "highprice", "2high", "max", "highbid", "bidhigh", "最高", "最高价"),
    "low": ("low", "l", "lowprice", "3low", "min", "lowbid", "bidlow", "最低", "最低价"),
    "close": (
        *("close", "c", "closeprice", "4close", "last", "settle", "price", "closebid", "bidclose", "收盘", "收盘价"),
    ),
    "volume": (
        *("volume", "vol", "v", "5volume", "6volume", "tradevolume", "basevolume", "volumebase", "qty", "quantity"),
        *("shares", "tickvolume", "成交量"),
    ),
    "amount": (
        *("amount", "amt", "turnover", "quotevolume", "quoteassetvolume", "dollarvolume", "value", "notional"),
        "成交额",
    ),
    "symbol": (
        *("symbol", "ticker", "sym", "instrument", "instrumentid", "code", "asset", "isin", "stock", "stockcode"),
        *("tscode", "股票代码", "代码"),
    ),
}
WITHOUT_HEADER = ("timestamps", *FIELDS)
KLINE_FIELDS = 12  # Binance's files have no header: …, volume, close time, quote volume, …
KLINE_AMOUNT = 7


@dataclass(frozen=True)
class Columns:
    """`of` maps our names to the file's; `ignored` are the file's others; `notes` describe guesses."""

    of: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plain(name: object) -> str:
    return re.sub(r"[\W_]+", "", str(name).strip().lower())


def guess_columns(
    names: Sequence[str], *, given: Mapping[str, str] | None = None, where: Origin | str = "the table"
) -> Columns:
    """Find the columns by name. `given` names some or all of them and is never overruled.

    >>> guess_columns(["Date", "Open", "High", "Low", "Close", "Vol."]).of["volume"]
    'Vol.'
    """
    source = Origin.of(where)
    found = dict(_checked(given or {}, names, source))
    taken = set(found.values())
    by_plain: dict[str, str] = {}
    for name in names:
        if name not in taken:
            by_plain.setdefault(plain(name), name)
    notes = []
    for field, synonyms in SYNONYMS.items():
        if field in found:
            continue
        matching = [by_plain[word] for word in synonyms if word in by_plain and by_plain[word] not in found.values()]
        if matching:
            found[field] = matching[0]
            if len(matching) > 1 and field not in ("timestamps", "date", "time"):
                others = ", ".join(map(repr, matching[1:]))
                notes.append(f"{field} is taken from {matching[0]!r}, not from {others}")
    if "timestamps" in found:  # one column says it all; a date beside it is the same thing again
        found = {field: name for field, name in found.items() if field not in ("date", "time")}
    elif "time" in found and "date" not in found:
        found["timestamps"] = found.pop("time")
    elif "date" in found and "time" not in found:
        found["timestamps"] = found.pop("date")
    absent = [field for field in PRICES if field not in found]
    timed = "timestamps" in found or "date" in found
    if absent and (value := value_column(found, names)) is not None:
        found = {field: name for field, name in found.items() if name != value}
        found["close"], absent = value, []
        notes += [told_of_values(value), *([] if timed else [COUNTED])]
    elif not timed:
        absent.insert(0, "timestamps")
    if absent:
        single = "" if "close" in found else f"; for a series of single values: {source.name_columns(['close'])}"
        raise InputError(
            f"{source.name} has no column for {', '.join(absent)}; its columns are {listed(names)}",
            hint=source.name_columns(absent) + single,
        )
    ignored = tuple(name for name in names if name not in found.values())
    return Columns(found, ignored, tuple(notes))


def columns_without_header(count: int, where: Origin | str) -> Columns:
    """The usual order, for a file whose first line is already a candle, a time with a value, or a value alone."""
    if count <= 2:
        of = {"close": "0"} if count == 1 else {"timestamps": "0", "close": "1"}
        notes = ["there is no header line", *([COUNTED] if count == 1 else [])]
        return Columns(of, (), (*notes, "each line is one value: its forecast is `close`"))
    if count < 5:
        raise InputError(
            f"{Origin.of(where).name} has no header line and {count} columns; a candle needs a time and four prices",
            hint="add a header line: timestamps,open,high,low,close,volume,amount",
        )
    of = {field: str(place) for place, field in enumerate(WITHOUT_HEADER) if place < count}
    ignored = [str(place) for place in range(len(WITHOUT_HEADER), count)]
    notes = ["there is no header line; the order is taken to be " + ", ".join(of)]
    if count == KLINE_FIELDS:
        of["amount"] = str(KLINE_AMOUNT)
        ignored = [str(place) for place in range(len(of) - 1, count) if place != KLINE_AMOUNT]
        notes = ["there is no header line; 12 columns are taken to be Binance's klines"]
    return Columns(of, tuple(ignored), tuple(notes))


def parse_given(text: str) -> dict[str, str]:
    """ "open=Eröffnung,close=Schluss" → {"open": "Eröffnung", …}."""
    pairs = {}
    for part in text.split(","):
        field, equals, name = part.partition("=")
        if not equals or not field.strip() or not name.strip():
            raise InputError(f"columns: {part!r} is not FIELD=NAME", hint=f"fields: {', '.join(ALL)}")
        pairs[field.strip()] = name.strip()
    return pairs


def _checked(given: Mapping[str, str], names: Sequence[str], source: Origin) -> Mapping[str, str]:
    for field, name in given.items():
        if field not in ALL:
            raise InputError(f"columns: unknown field {field!r}", hint=f"fields: {', '.join(ALL)}")
        if name not in names:
            raise InputError(
                f"{source.name} has no column {name!r} (for {field}); its columns are {listed(names)}",
                hint=did_you_mean(name, names, f"spell it as the {'table' if source.in_memory else 'file'} does"),
            )
    return given
