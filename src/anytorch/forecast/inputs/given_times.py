"""Read timestamps passed as datetimes of pandas, polars or NumPy, as text, as epochs, or as a column of the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from anytorch import logs
from anytorch.errors import InputError
from anytorch.forecast.candles.times import parse_times

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

log = logs.logger(__name__)

TIME_COLUMNS = ("timestamps", "timestamp", "datetime", "date", "time")


def history_times(frame: pd.DataFrame, given: Any, where: str) -> pd.DatetimeIndex:
    """The timestamps given; else the frame's index or the column that is called like one."""
    import pandas as pd

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
    raise InputError(
        f"{where} has no timestamps: x_timestamp is missing, and neither its index nor a column holds them",
        hint="pass x_timestamp, or a frame with a DatetimeIndex or a column 'timestamps'",
    )


def as_times(given: Any, where: str) -> pd.DatetimeIndex:
    import pandas as pd

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
        times = from_words(given, where)
    refuse_gaps(times.isna(), where)
    return times


def refuse_gaps(missing: Any, where: str) -> None:
    rows = np.flatnonzero(missing)
    if len(rows):
        raise InputError(f"{where}, row {rows[0]}: the timestamp is missing")


def as_numbers(given: Any) -> pd.Series | None:
    """Timestamps as numbers, if that is what they are: a whole column of them, no words and no datetimes."""
    import pandas as pd

    try:
        column = pd.Series(given if isinstance(given, (pd.Series, pd.Index, np.ndarray)) else list(given))
    except (TypeError, ValueError):  # no column at all: the caller says so
        return None
    column = column.infer_objects().reset_index(drop=True)
    numeric = pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)
    return column if numeric and len(column) else None


def from_numbers(numbers: pd.Series, where: str) -> pd.DatetimeIndex:
    """Epochs by their size, as in a file: pandas alone takes every number for nanoseconds, and dates it 1970."""
    import pandas as pd

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


def from_words(given: Any, where: str) -> pd.DatetimeIndex:
    import pandas as pd

    try:
        return pd.DatetimeIndex(given)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InputError(
            f"{where}: these are not timestamps ({str(exc).splitlines()[0]})", hint="give datetimes of one time zone"
        ) from exc


def column_values(column: Any) -> Any:
    """A polars column for pandas, with its time zone."""
    import pandas as pd

    zone = getattr(column.dtype, "time_zone", None)
    values = column.to_numpy()
    return pd.DatetimeIndex(values).tz_localize("UTC").tz_convert(zone) if zone else values
