"""A series of single values (sales, temperatures, a closing price alone) as the candles that the model sees.

Each bar opens at the value before it and closes at its own; high and low are the larger and the smaller of the two. So the
forecast of the series is the forecast's `close`. Values may be zero or negative, which prices may not: a table of such
candles carries the mark SINGLE in its `attrs`. Rows without times count as days.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anytorch.forecast.candles.tables import FIELDS, PRICES
from anytorch.forecast.candles.tables import pandas as pd

SINGLE = "anytorch.single"
FIRST_DAY = "2000-01-03"  # a Monday


def as_candles(frame: Any) -> Any:
    """The frame, whose prices are `close` alone, with open, high and low beside it; marked as single values."""
    close = frame["close"].to_numpy(dtype=float)
    opened = np.concatenate([close[:1], close[:-1]])
    made = frame.assign(open=opened, high=np.fmax(opened, close), low=np.fmin(opened, close))
    first = [name for name in ("timestamps", "open", "high", "low", "close") if name in made]
    return marked(made[[*first, *(name for name in made.columns if name not in first)]])


def marked(frame: Any, single: bool = True) -> Any:
    frame.attrs[SINGLE] = single
    return frame


def is_single(frame: Any) -> bool:
    return bool(frame.attrs.get(SINGLE, False))


def given_columns(frame: Any) -> list[str]:
    """The columns of FIELDS whose faults are told: of single values the open, high and low are made from the `close`.

    A missing value is otherwise found in the next row first, whose open it is.
    """
    made = [name for name in PRICES if name != "close"] if is_single(frame) else []
    return [name for name in FIELDS if name in frame and name not in made]


def counted_days(rows: int) -> Any:
    """The times of rows that have none."""
    return pd.date_range(FIRST_DAY, periods=rows, freq="D")
