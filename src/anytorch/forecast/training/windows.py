"""Training windows over many instruments: cut by time, normalised by their past only, gathered on demand.

A window lies whole in one split, so nothing a model is validated on was seen in training. Its numbers are normalised by
mean and deviation of its lookback part only: what comes after has no influence on what the model is given. (The published
CSV script uses the whole window, future included.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from anytorch.errors import InputError
from anytorch.forecast.candles.read import CandleSeries, read_candles, read_many
from anytorch.forecast.inputs import stamps as stamps_of
from anytorch.forecast.inputs import with_volume
from anytorch.values import dataclass

EPS = 1e-5  # added to the deviation, as published
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Windows:
    """Windows of `lookback` + `horizon` + 1 rows. `starts` are their first rows in `values`, oldest instruments first."""

    values: Any  # float32 [rows, 6] of all instruments, one after the other
    stamps: Any  # int64 [rows, 5]: minute, hour, weekday, day, month
    starts: Any  # int64 [windows]
    lookback: int
    horizon: int
    clip: float = 5.0
    period: tuple[str, str] = ("", "")  # the first and last timestamp of the split

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def length(self) -> int:
        return self.lookback + self.horizon + 1

    def batch(self, chosen: Sequence[int] | Any) -> tuple[Any, Any]:
        """Normalised, clipped values float32 [batch, length, 6] and stamps int64 [batch, length, 5]."""
        rows = self.starts[np.asarray(chosen)][:, None] + np.arange(self.length)
        raw = self.values[rows]
        past = raw[:, : self.lookback].astype(np.float64)
        mean, deviation = past.mean(axis=1, keepdims=True), past.std(axis=1, keepdims=True) + EPS
        return np.clip((raw - mean) / deviation, -self.clip, self.clip).astype(np.float32), self.stamps[rows]

    def thinned(self, most: int) -> Windows:
        """At most so many of them, evenly spread."""
        if len(self) <= most:
            return self
        kept = self.starts[np.linspace(0, len(self) - 1, most).round().astype(int)]
        return Windows(self.values, self.stamps, kept, self.lookback, self.horizon, self.clip, self.period)


def split_windows(
    series: Sequence[CandleSeries],
    *,
    lookback: int,
    horizon: int,
    validation: float = 0.1,
    test: float = 0.1,
    stride: int = 1,
    clip: float = 5.0,
) -> dict[str, Windows]:
    """Train, validation and test windows. The cuts are two moments, the same for every instrument.

    `validation` and `test` are shares of the bars; the latest are for testing. A split of share 0 has no windows.
    """
    if lookback < 2 or horizon < 1 or stride < 1:
        raise InputError(f"lookback={lookback}, horizon={horizon}, stride={stride}: use at least 2, 1 and 1")
    if not (0 <= validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise InputError(f"validation={validation}, test={test}: shares of the data, together below 1")
    if not series:
        raise InputError("there is no data to train on", hint="name a CSV or Parquet file")
    _require_one_kind_of_time(series)
    length = lookback + horizon + 1
    indices = [pd.DatetimeIndex(one.frame["timestamps"]) for one in series]
    # Nanoseconds since 1970, as UTC where there is a zone.
    moments = [index.values.astype("datetime64[ns]").astype(np.int64) for index in indices]
    ordered = np.sort(np.concatenate(moments))
    cuts = [_cut(ordered, 1 - validation - test), _cut(ordered, 1 - test)]
    values = np.concatenate([as_values(one.frame) for one in series])
    stamps = np.concatenate([stamps_of(index) for index in indices])
    starts: dict[str, list[Any]] = {name: [] for name in SPLITS}
    offset = 0
    for own in moments:
        edges = [0, *(int(np.searchsorted(own, cut)) for cut in cuts), len(own)]
        for name, begin, end in zip(SPLITS, edges[:-1], edges[1:], strict=True):
            starts[name].append(offset + np.arange(begin, end - length + 1, stride))
        offset += len(own)
    made = {}
    for place, name in enumerate(SPLITS):
        low, high = [ordered[0], *cuts][place], [*cuts, ordered[-1]][place]
        period = (str(pd.Timestamp(int(low))), str(pd.Timestamp(int(high))))
        found = np.concatenate(starts[name]).astype(np.int64)
        made[name] = Windows(values, stamps, found, lookback, horizon, clip, period)
    _require(made, validation, length, series)
    return made


def _require(made: Mapping[str, Windows], validation: float, length: int, series: Sequence[CandleSeries]) -> None:
    longest = max(series, key=len)
    for name in ("train", "validation"):
        if len(made[name]) or (name == "validation" and not validation):
            continue
        raise InputError(
            f"the {name} period ({made[name].period[0]} to {made[name].period[1]}) holds no window of {length} rows; "
            f"the longest of {len(series)} series, {longest.name}, has {len(longest)} rows in all",
            hint="give more data, or lower lookback and horizon, or change the shares of validation and test",
        )


def _require_one_kind_of_time(series: Sequence[CandleSeries]) -> None:
    """Instruments are cut at the same moment: times with a zone and times without cannot be compared."""
    aware = [one for one in series if one.frame["timestamps"].dt.tz is not None]
    naive = [one for one in series if one.frame["timestamps"].dt.tz is None]
    if aware and naive:
        raise InputError(
            f"{aware[0].name} has timestamps with a time zone, {naive[0].name} without one",
            hint="name the zone with --timezone, or write all files alike",
        )


def _cut(ordered: Any, share: float) -> int:
    return int(ordered[-1]) + 1 if share >= 1 else int(ordered[int(share * len(ordered))])


def as_values(frame: Any) -> Any:
    """The six columns as a forecast has them, float32."""
    return with_volume(frame, "the data").to_numpy(np.float32)


def as_series(data: Any, *, repair: bool = False) -> list[CandleSeries]:
    """Series from what a caller has: paths, tables, a dictionary of tables by name, or series that were read before."""
    if isinstance(data, CandleSeries):
        return [data]
    if isinstance(data, (str, Path)):
        return read_many([data], repair=repair)
    if isinstance(data, Mapping):
        named = []
        for name, table in data.items():
            named += read_candles(table, repair=repair, name=str(name))
        return named
    if isinstance(data, pd.DataFrame) or hasattr(data, "to_pandas") or not isinstance(data, Iterable):
        return read_candles(data, repair=repair)
    found = []
    for part in data:
        found += as_series(part, repair=repair)
    return found
