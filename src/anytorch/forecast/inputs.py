"""Check the input of a forecast: arguments, tables and timestamps of any kind in, one checked and scaled series out.

Arguments are numbers in their range. Tables are pandas', polars', pyarrow's or NumPy's; timestamps are datetimes, words,
epochs, or a column of the table. Every refusal names the series, the row and the column. With `checks=False` only what
cannot be computed is refused, as in the published code.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anytorch import limits, logs
from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.forecast.candles.columns import COUNTED, value_column
from anytorch.forecast.candles.read import problems
from anytorch.forecast.candles.rhythm import future_times
from anytorch.forecast.candles.single import as_candles, counted_days, given_columns, is_single, marked
from anytorch.forecast.candles.tables import FIELDS, PRICES, as_pandas, column_values, listed
from anytorch.forecast.candles.tables import pandas as pd
from anytorch.forecast.candles.times import parse_times
from anytorch.forecast.decoding.sampling import Sampler
from anytorch.limits import Limit


def whole_number(name: str, value: Any, limit: Limit, why: str = "") -> int:
    """Any kind of integer (NumPy's, too) within the limit; `why` ends the message for one below it."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}, not a whole number")
    if not limit.holds(found):
        raise InputError(f"{name} is {found}; {why if why and found < limit.least else limit.words}")
    return found


def real_number(name: str, value: Any) -> float:
    a_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not a_number:
        raise InputError(f"{name} is {value!r}, not a number")
    return value if isinstance(value, (int, float)) else float(value)


def make_sampler(T: Any, top_k: Any, top_p: Any) -> Sampler:
    """How ids are drawn. None for `top_k` or `top_p` means that it does not cut."""
    return Sampler(
        real_number("T", T),
        0 if top_k is None else whole_number("top_k", top_k, limits.TOP_K, "it must not be negative; 0 keeps all ids"),
        1.0 if top_p is None else real_number("top_p", top_p),
    )


def quantile_levels(levels: Any) -> tuple[float, ...]:
    if levels is None:
        return ()
    listed = levels.tolist() if hasattr(levels, "tolist") else levels  # NumPy's
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise InputError(f"quantiles is {levels!r}, not a list of levels", hint="quantiles=(0.1, 0.5, 0.9)")
    wanted = tuple(real_number("a quantile", level) for level in listed)
    for level in wanted:
        if not 0 <= level <= 1:
            raise InputError(f"quantile {level:g} is not between 0 and 1")
    return wanted


log = logs.logger(__name__)

TIME_COLUMNS = ("timestamps", "timestamp", "datetime", "date", "time")


def history_times(frame: pd.DataFrame, given: Any, where: str) -> pd.DatetimeIndex:
    """The timestamps given; else the frame's index or the column that is called like one."""
    if given is not None:
        return as_times(given, f"{where}, x_timestamp")
    if isinstance(frame.index, (pd.DatetimeIndex, pd.PeriodIndex)):
        return as_times(frame.index, f"{where}, index")
    for name in TIME_COLUMNS:
        found = [column for column in frame.columns if str(column).lower() == name]
        if len(found) > 1 and len(set(found)) == 1:
            raise InputError(f"{where} has {len(found)} columns called {found[0]!r}", hint="keep one of them")
        if found:
            return as_times(frame[found[0]], f"{where}, column {found[0]!r}")
    if with_prices(frame, where) is not frame:
        log.warning("%s: %s", where, COUNTED)
        return counted_days(len(frame))
    raise InputError(
        f"{where} has no timestamps: x_timestamp is missing, and neither its index nor a column holds them",
        hint="pass x_timestamp, or a frame with a DatetimeIndex or a column 'timestamps'",
    )


def as_times(given: Any, where: str) -> pd.DatetimeIndex:
    if type(given).__module__.startswith("polars"):
        given = column_values(given)
    if isinstance(given, Iterator):  # is looked at more than once below
        given = list(given)
    if isinstance(getattr(given, "dtype", None), pd.PeriodDtype):
        given = pd.PeriodIndex(given).to_timestamp()
    if isinstance(given, pd.DatetimeIndex):
        times = given
    elif (numbers := as_numbers(given)) is not None:
        times = from_numbers(numbers, where)
    else:
        try:
            times = pd.DatetimeIndex(given)
        except (ValueError, TypeError, OverflowError) as exc:
            raise InputError(
                f"{where}: these are not timestamps ({str(exc).splitlines()[0]})",
                hint="give datetimes of one time zone",
            ) from exc
    refuse_gaps(times.isna(), where)
    return times


def refuse_gaps(missing: Any, where: str) -> None:
    rows = np.flatnonzero(missing)
    if len(rows):
        raise InputError(f"{where}, row {rows[0]}: the timestamp is missing")


def as_numbers(given: Any) -> pd.Series | None:
    """Timestamps as numbers, if that is what they are: a whole column of them, no words and no datetimes."""
    try:
        column = pd.Series(given if isinstance(given, (pd.Series, pd.Index, np.ndarray)) else list(given))
    except (TypeError, ValueError):  # no column at all: the caller says so
        return None
    column = column.infer_objects().reset_index(drop=True)
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    return column if numeric and len(column) else None


def from_numbers(numbers: pd.Series, where: str) -> pd.DatetimeIndex:
    """Epochs by their size, as in a file: pandas alone takes every number for nanoseconds, and dates it 1970."""
    refuse_gaps(numbers.isna(), where)
    try:
        times, notes = parse_times(numbers, range(len(numbers)), "timestamps", where)
    except InputError as exc:
        raise InputError(
            f"{where}: numbers such as {numbers.iloc[0]} are not timestamps",
            hint="give datetimes, or an epoch in seconds, milliseconds, microseconds or nanoseconds",
        ) from exc
    for words in notes:
        if "nanoseconds" not in words:  # what pandas itself would have read
            log.warning("%s: %s", where, words)
    return pd.DatetimeIndex(times)


SHORTEST = 2  # rows: with one, the scale would be made up
REFUSED = ("unsorted", "duplicate", "price", "negative", "upside-down")
STAMP_FIELDS = ("minute", "hour", "day_of_week", "day", "month")


@dataclass(frozen=True)
class Series:
    """One series, ready for the model."""

    where: str  # "series 3" or "the history"
    normal: np.ndarray  # float32 [rows, 6]: z-scored over the whole history, not clipped yet
    mean: np.ndarray  # float32 [6]
    scale: np.ndarray  # float32 [6]: standard deviation + SCALE_FLOOR
    stamp: np.ndarray  # int64 [rows, 5]
    future_stamp: np.ndarray  # int64 [pred_len, 5]
    future: pd.Index
    warnings: tuple[str, ...] = ()  # why its forecast may be wrong

    def restored(self, normal: np.ndarray) -> np.ndarray:
        """Normalised values […, 6] on the scale of the data."""
        restored: np.ndarray = normal * self.scale + self.mean
        return restored


def read_series(
    table: Any,
    x_timestamp: Any,
    y_timestamp: Any,
    pred_len: int | None,
    *,
    where: str,
    checks: bool,
    rescale: bool = False,
    lookback: int | None = None,
) -> Series:
    """Check one history (its last `lookback` rows) and the times to forecast. Raises InputError."""
    if pred_len is not None:
        pred_len = whole_number("pred_len", pred_len, limits.STEPS)
    frame = as_frame(table, where)
    require_history(len(frame), where)  # before the times: a table of nothing lacks these, too
    times = history_times(frame, x_timestamp, where)
    frame = with_prices(frame, where)
    if len(times) != len(frame):
        raise InputError(f"{where} has {len(frame)} rows and {len(times)} timestamps")
    if lookback is not None:
        frame, times = frame.iloc[-lookback:], times[-lookback:]
    values = marked(with_volume(frame, where), is_single(frame))
    refuse_missing(values, times, where)
    if checks:
        refuse_problems(values, times, where)
    if y_timestamp is not None:
        future = as_times(y_timestamp, f"{where}, y_timestamp")
    elif pred_len is None:
        raise InputError(f"{where}: pass pred_len or y_timestamp: the number of steps is missing")
    else:
        future = future_times(times, pred_len)
    if pred_len is not None and len(future) != pred_len:
        raise InputError(
            f"{where}: pred_len is {pred_len} and y_timestamp has {len(future)} entries",
            hint="pass one timestamp per step, or none to continue the rhythm of the history",
        )
    if len(future) == 0:
        raise InputError(f"{where}: pred_len is 0; use at least 1")
    refuse_mixed_zones(times, future, where)
    if checks and not future[0] > times[-1]:
        raise InputError(
            f"{where}: the first time to forecast, {future[0]}, is not after the last row of the history, {times[-1]}",
            hint="the history must end where the forecast begins",
        )
    if checks and len(steps := np.flatnonzero(np.diff(future.asi8) <= 0)):
        entry = int(steps[0]) + 1
        raise InputError(
            f"{where}, y_timestamp, entry {entry}: {future[entry]} is not after the one before it, {future[entry - 1]}",
            hint="the times to forecast must increase; pass checks=False if this is intended",
        )
    found = scale_columns(values.to_numpy(dtype=np.float64), FIELDS, rescale=rescale, where=where)
    for words in found.warnings:
        log.warning("%s", words)
    index = future
    if isinstance(y_timestamp, pd.Series) and not pd.api.types.is_numeric_dtype(y_timestamp):
        index = pd.Index(y_timestamp)
    return Series(where, found.normal, found.mean, found.scale, stamps(times), stamps(future), index, found.warnings)


def require_history(rows: int, where: str) -> None:
    if rows < SHORTEST:
        raise InputError(
            f"{where} has {counted(rows, 'row')}; at least {SHORTEST} are needed", hint="give more history"
        )


def with_prices(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """The frame; one with a single column of values, besides its times, as candles (candles/single.py)."""
    names = [name for name in frame.columns if str(name).lower() not in TIME_COLUMNS]
    numeric = [name for name in names if pd.api.types.is_numeric_dtype(frame[name])] if frame.columns.is_unique else []
    value = value_column({name: name for name in FIELDS if name in names}, numeric)
    if value is None:
        return frame
    close = pd.to_numeric(frame[value], errors="coerce")
    return as_candles(frame.drop(columns=[value]).assign(close=close))


def as_frame(table: Any, where: str) -> pd.DataFrame:
    """A pandas frame with our columns by our names; NumPy's are taken in the order of FIELDS; a row of numbers is values."""
    if isinstance(table, pd.Series):
        return table.to_frame("close")
    if isinstance(table, (list, tuple)) and table and all(isinstance(one, numbers.Real) for one in table):
        table = np.asarray(table, dtype=float)
    if isinstance(table, np.ndarray) and table.ndim == 1 and table.dtype.kind in "iuf":
        return pd.DataFrame({"close": table})
    if (frame := as_pandas(table, where)) is not None:
        # `Open`, `Volume`, … by our names, where only one column can be meant and ours is not there.
        names = list(frame.columns)
        ours = {name: [other for other in names if str(other).lower() == name] for name in FIELDS if name not in names}
        renamed = {found[0]: name for name, found in ours.items() if len(found) == 1}
        return frame.rename(columns=renamed) if renamed else frame
    if isinstance(table, np.ndarray) and table.ndim == 2 and len(PRICES) <= table.shape[1] <= len(FIELDS):
        return pd.DataFrame(table, columns=list(FIELDS[: table.shape[1]]))
    if isinstance(table, (list, tuple)):
        if not table:
            require_history(0, where)
        if others := [one for one in table if hasattr(one, "shape") or hasattr(one, "columns")]:
            raise InputError(
                f"{where} is a {type(table).__name__} of {type(others[0]).__name__}s, not one table",
                hint="predict_batch and forecast_batch take a list of tables, predict and forecast one table",
            )
    raise InputError(
        f"{where} is a {type(table).__name__}" + (f" of shape {table.shape}" if isinstance(table, np.ndarray) else ""),
        hint="give a pandas or polars DataFrame with open, high, low, close (volume, amount), an array with those "
        "columns in that order, or one column of values",
    )


def with_volume(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """The six columns as numbers. No volume: both are 0; volume without amount: volume times the mean price."""
    missing = [name for name in PRICES if name not in frame.columns]
    if missing:
        there = listed(frame.columns)
        raise InputError(f"{where} lacks the column(s) {', '.join(missing)}; it has {there}")
    values = {}
    for name in FIELDS:
        if name not in frame.columns:
            continue
        if (found := list(frame.columns).count(name)) > 1:
            raise InputError(f"{where} has {found} columns called {name!r}", hint="keep one of them")
        column = pd.to_numeric(frame[name], errors="coerce")
        words = np.flatnonzero((column.isna() & frame[name].notna()).to_numpy())
        if len(words):
            value = frame[name].iloc[words[0]]
            raise InputError(f"{where}, row {words[0]}, column {name!r}: {value!r} is not a number")
        values[name] = column.to_numpy(dtype=np.float64, na_value=np.nan)
    if "volume" not in values:
        values["volume"] = values["amount"] = np.zeros(len(frame))
    elif "amount" not in values:
        values["amount"] = values["volume"] * np.mean([values[name] for name in PRICES], axis=0)
    return pd.DataFrame({name: values[name] for name in FIELDS})


def refuse_missing(values: pd.DataFrame, times: pd.DatetimeIndex, where: str) -> None:
    values = values[given_columns(values)]
    rows, columns = np.nonzero(~np.isfinite(values.to_numpy()))
    if len(rows):
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        raise InputError(
            f"{where}, row {rows[0]} ({times[rows[0]]}), column {values.columns[columns[0]]!r}: "
            f"{values.iat[rows[0], columns[0]]} is not a number{more}",
            hint="fill or drop such rows first; `anytorch forecast --repair` does it for a file",
        )


def refuse_problems(values: pd.DataFrame, times: pd.DatetimeIndex, where: str) -> None:
    """The kinds in REFUSED raise; huge gaps and constant prices can be forecast, and are logged."""
    for problem in problems(marked(values.assign(timestamps=pd.Series(times)), is_single(values)), range(len(times))):
        text = f"{where}, row {problem.line} ({times[problem.line]}), column {problem.column!r}: {problem.text}"
        text += f" (and {problem.count - 1} more)" if problem.count > 1 else ""
        if problem.kind in REFUSED:
            raise InputError(text, hint="correct it, or pass checks=False if this is intended")
        log.warning("%s", text)


def refuse_mixed_zones(times: pd.DatetimeIndex, future: pd.DatetimeIndex, where: str) -> None:
    if (times.tz is None) != (future.tz is None) or (times.tz is not None and str(times.tz) != str(future.tz)):
        raise InputError(
            f"{where}: the history's time zone is {times.tz or 'not given'}, that of y_timestamp {future.tz or 'not given'}",
            hint="the model sees hours and weekdays: give both in one zone (tz_convert, tz_localize)",
        )


def stamps(times: pd.DatetimeIndex) -> np.ndarray:
    """int64 [rows, 5] in the order of STAMP_FIELDS, by the clock on the wall of the series' own time zone."""
    return np.stack([np.asarray(getattr(times, name), dtype=np.int64) for name in STAMP_FIELDS], axis=1)


def check_arrays(x: Any, x_stamp: Any, y_stamp: Any, pred_len: int) -> None:
    """Check the arrays of the published `generate`: [series, rows, 6] and stamps [series, rows or pred_len, 5]."""
    shape = tuple(np.shape(x))
    if len(shape) != 3 or shape[2] != len(FIELDS) or shape[1] < 1:
        raise InputError(f"x has the shape {list(shape)}, not [series, rows, {len(FIELDS)}]")
    for name, stamp, rows in (("x_stamp", x_stamp, shape[1]), ("y_stamp", y_stamp, pred_len)):
        if (found := tuple(np.shape(stamp))) != (shape[0], rows, len(STAMP_FIELDS)):
            raise InputError(f"{name} has the shape {list(found)}, not [{shape[0]}, {rows}, {len(STAMP_FIELDS)}]")


def from_arrays(x: np.ndarray, x_stamp: np.ndarray, y_stamp: np.ndarray) -> list[Series]:
    """Make series from arrays that are already normalised."""
    zero, one, nothing = np.zeros(len(FIELDS), np.float32), np.ones(len(FIELDS), np.float32), pd.Index([])
    return [
        Series(f"series {place}", values, zero, one, before, after, nothing)
        for place, (values, before, after) in enumerate(zip(x, x_stamp, y_stamp, strict=True))
    ]


def one_each(given: Sequence[Any] | None, count: int, name: str) -> Sequence[Any]:
    """A list with one entry per series, or None for each."""
    if given is None:
        return [None] * count
    if not isinstance(given, (list, tuple)):
        raise InputError(f"{name} is a {type(given).__name__}, not a list or a tuple with one entry per series")
    if len(given) != count:
        raise InputError(f"{name} has {len(given)} entries for {count} series")
    return given


# --- scaling ---------------------------------------------------------------------------------------------------------

# The published scaling is (x - mean) / (standard deviation + 1e-5), in float32. The 1e-5 gives a constant column a forecast
# (itself), but drowns a column whose values lie close together: of prices around 1e-6 the model sees a flat line, and the
# forecast moves by 1e-5, ten times the price. That is said; `rescale` counts such a column in units of its own spread.
SCALE_FLOOR = 1e-5  # added to the standard deviation
DROWNED = 10 * SCALE_FLOOR  # a smaller deviation loses more than a tenth of itself to the floor
FLOAT32 = np.finfo(np.float32)
HEADROOM = 1e4  # a forecast goes beyond the history, and paths are summed for their mean


@dataclass(frozen=True)
class Scaled:
    """normal · scale + mean is the data."""

    normal: np.ndarray  # float32 [rows, columns]
    mean: np.ndarray  # float32 [columns]
    scale: np.ndarray  # float32 [columns]
    warnings: tuple[str, ...]  # what the published scaling does to some column


def scale_columns(values: np.ndarray, names: Sequence[str], *, rescale: bool, where: str) -> Scaled:
    """float64 [rows, columns] of finite values. Raises InputError for a column whose size float32 cannot hold.

    Values that differ by less than float32 can tell apart are constant here: what is left is the noise of a computation.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        x = values.astype(np.float32)
        mean, scale = np.mean(x, axis=0), np.std(x, axis=0) + SCALE_FLOOR
        normal = (x - mean) / scale
        deviation, largest = np.std(values, axis=0), np.abs(values).max(axis=0)
        drowned = (np.ptp(values, axis=0) > FLOAT32.eps * largest) & (deviation < DROWNED)
        lost = ~(np.isfinite(mean) & np.isfinite(scale))
        if rescale:
            for column in np.flatnonzero(drowned | lost):
                # As if it were given in another unit: what the published code computes for prices per million coins.
                unit = unit_of(deviation[column], largest[column])
                own = (values[:, column] / unit).astype(np.float32)
                own_mean, own_scale = np.mean(own), np.std(own) + SCALE_FLOOR
                normal[:, column] = (own - own_mean) / own_scale
                mean[column], scale[column] = np.float64(own_mean) * unit, np.float64(own_scale) * unit
                fits = np.abs(mean[column]) + scale[column] <= FLOAT32.max / HEADROOM
                lost[column] = not (fits and scale[column] >= FLOAT32.tiny)
    if lost.any():
        first = int(np.flatnonzero(lost)[0])
        much, other = ("large", "larger") if largest[first] > 1 else ("small", "smaller")
        raise InputError(
            f"{where}, column {names[first]!r}: values up to {largest[first]:.3g} are too {much} to compute with in float32",
            hint=f"give the column in a {other} unit" + ("" if rescale else ", or pass rescale=True"),
        )
    warnings = []
    if drowned.any() and not rescale:
        so = "cannot be trusted" if seen_share(deviation[drowned].min()) < 0.5 else "may be a little worse for it"
        warnings = [
            f"{where}, {drowning(deviation, drowned, names)}, and the forecast {so} (rescale=True counts such columns in a "
            "smaller unit, which is not what the published code does)"
        ]
    return Scaled(normal, mean, scale, tuple(warnings))


def unit_of(deviation: float, largest: float) -> float:
    """The power of ten to count a column in. Where the deviation went out of float64's range, the values' size says it."""
    size = deviation if 0 < deviation < math.inf else largest
    return float(10.0 ** max(math.floor(math.log10(size)), math.ceil(math.log10(sys.float_info.min))))


def seen_share(deviation: float) -> float:
    """How much of a column's movement the floor leaves."""
    return float(deviation / (deviation + SCALE_FLOOR))


def drowning(deviation: np.ndarray, drowned: np.ndarray, names: Sequence[str]) -> str:
    """What the floor does to the columns that are `drowned` (bool [columns])."""
    which = [name for name, found in zip(names, drowned, strict=True) if found]
    least = float(deviation[drowned].min())
    return (
        f"column{'s' if len(which) > 1 else ''} {', '.join(which)}: the values vary by only {least:.2g}, and the published "
        f"scaling adds {SCALE_FLOOR:g} to that: the model sees {seen_share(least):.2%} of their movement"
    )
