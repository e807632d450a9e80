"""Find faults in a series of candles, with line and column, and repair them.

| what is wrong | the repair |
|---|---|
| timestamps out of order | sorted |
| a timestamp twice | the last of them is kept |
| a timestamp missing | nothing: it is refused before |
| a price that is missing, zero or negative | close: the one before; open: the close before; high, low: of these |
| high below low | swapped |
| volume missing or negative | 0 |
| amount missing or negative | volume times the mean price |
| a price that never changes | kept: its forecast is itself |
| a gap far beyond the rhythm | the series is cut there |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anytorch.counts import counted
from anytorch.errors import InputError
from anytorch.forecast.candles.columns import FIELDS, PRICES
from anytorch.forecast.candles.places import Source, refused
from anytorch.values import dataclass

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

MOST_MENDED = 0.2  # of the rows: beyond that a repair would be an invention
GAP_STEPS = 10  # a gap is huge beyond this many times a usual long step (a night, a weekend) …
GAP_DAYS = 14  # … and never below this


@dataclass(frozen=True)
class Problem:
    """One kind of fault: its first place and how often it occurs."""

    kind: str
    line: int
    column: str
    text: str
    count: int = 1

    def said(self, where: Source | str) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        return f"{Source.of(where).at(self.line, self.column)}: {self.text}{more}"


def problems(frame: pd.DataFrame, lines: Sequence[int]) -> list[Problem]:
    """All faults of a frame with our columns; `lines` are the rows' line numbers in their file."""
    import numpy as np

    found: list[Problem] = []

    def note(kind: str, column: str, bad: Any, text: str) -> None:
        places = np.flatnonzero(bad)
        if len(places):
            value = frame[column].iloc[places[0]]
            found.append(Problem(kind, int(lines[places[0]]), column, text.format(value=value), len(places)))

    times = frame["timestamps"]
    steps = times.diff()
    zero = steps - steps  # NaT in the first row, so that it is never counted
    note("unsorted", "timestamps", (steps < zero).to_numpy(), "{value} comes after a later timestamp")
    note("duplicate", "timestamps", times.duplicated().to_numpy(), "{value} occurs twice")
    for column in [name for name in FIELDS if name in frame]:
        values = frame[column].to_numpy(dtype=float)
        note("missing", column, ~np.isfinite(values), "{value} is not a number")
        with np.errstate(invalid="ignore"):
            if column in PRICES:
                note("price", column, values <= 0, "the price is {value}, which is not above 0")
            else:
                note("negative", column, values < 0, "{value} is negative")
    note("upside-down", "high", (frame["high"] < frame["low"]).to_numpy(), "{value} is below the low of the same bar")
    prices = frame[list(PRICES)].to_numpy(dtype=float)
    if len(frame) > 1 and np.isfinite(prices).all() and (prices == prices[0, 0]).all():
        found.append(Problem("constant", int(lines[0]), "close", f"all prices are {prices[0, 0]:g}, in every row"))
    for place in gaps(times):
        text = f"{times.iloc[place - 1]} is followed by {times.iloc[place]}: a gap far beyond the usual step"
        found.append(Problem("gap", int(lines[place]), "timestamps", text))
    return found


def gaps(times: Any) -> list[int]:
    """The rows before which there is a huge gap."""
    import numpy as np

    if len(times) < 3:
        return []
    seconds = times.diff().dt.total_seconds().to_numpy()[1:]
    if not (seconds > 0).any():
        return []
    # The usual long step, such as a weekend; of few rows one gap may be more than a hundredth, so those are left out.
    most = max(GAP_STEPS * float(np.median(seconds[seconds > 0])), GAP_DAYS * 86400)
    usual = float(np.quantile(seconds[(seconds > 0) & (seconds <= most)], 0.99, method="lower"))
    return [int(place) + 1 for place in np.flatnonzero(seconds > max(GAP_STEPS * usual, GAP_DAYS * 86400))]


def require_clean(frame: pd.DataFrame, lines: Sequence[int], where: Source | str) -> None:
    """Raise InputError for the first problem, with the number of other kinds."""
    found = problems(frame, lines)
    if not found:
        return
    others = sorted({problem.kind for problem in found} - {found[0].kind})
    also = f"; also {', '.join(others)}" if others else ""
    raise InputError(found[0].said(where) + also, hint=Source.of(where).mend)


def repaired(frame: pd.DataFrame, lines: Sequence[int], where: Source | str) -> tuple[pd.DataFrame, Any, list[str]]:
    """The frame with every repair of the table above except the gaps, its lines, and what was changed, in words."""
    import numpy as np

    found = problems(frame, lines)
    if not found:
        return frame, np.asarray(lines), []
    kinds = {problem.kind for problem in found}
    frame = frame.reset_index(drop=True)
    kept = np.asarray(lines)
    if "unsorted" in kinds:
        order = np.argsort(frame["timestamps"].to_numpy(), kind="stable")
        frame, kept = frame.iloc[order].reset_index(drop=True), kept[order]
    if "duplicate" in kinds:
        once = ~frame["timestamps"].duplicated(keep="last").to_numpy()
        frame, kept = frame[once].reset_index(drop=True), kept[once]
    frame = frame.copy()
    for column in [name for name in FIELDS if name in frame]:
        values = frame[column].to_numpy(dtype=float).copy()
        bad = ~np.isfinite(values) | (values <= 0 if column in PRICES else values < 0)
        if column in PRICES and bad.mean() > MOST_MENDED:
            raise refused(
                where,
                kept[np.flatnonzero(bad)[0]],
                column,
                f"{bad.mean():.0%} of the prices are missing or not above 0, more than a repair may fill in "
                f"({MOST_MENDED:.0%})",
                hint="remove the faulty part",
            )
        values[bad] = np.nan
        frame[column] = values
    frame["close"] = frame["close"].ffill()
    before = frame["close"].shift()
    frame["open"] = frame["open"].fillna(before)
    started = (frame["open"].notna() & frame["close"].notna()).to_numpy()  # nothing comes before the first row
    left_out = kept[~started]
    frame, kept = frame[started].reset_index(drop=True), kept[started]
    ends = frame[["open", "close"]]
    frame["high"] = frame["high"].fillna(ends.max(axis=1))
    frame["low"] = frame["low"].fillna(ends.min(axis=1))
    high, low = frame[["high", "low"]].max(axis=1), frame[["high", "low"]].min(axis=1)
    frame["high"], frame["low"] = high, low
    if "volume" in frame:
        frame["volume"] = frame["volume"].fillna(0.0)
    if "amount" in frame:
        made_up = frame[list(PRICES)].mean(axis=1) * frame.get("volume", 0.0)
        frame["amount"] = frame["amount"].fillna(made_up)
    notes = [
        f"repaired: {problem.said(where)}; {_changed(problem, frame, kept)}"
        for problem in found
        if problem.kind not in ("gap", "constant")
    ]
    notes += [
        f"kept: {problem.said(where)}; their forecast is constant" for problem in found if problem.kind == "constant"
    ]
    if len(left_out):
        rows = counted(len(left_out), f"{Source.of(where).unit} is", f"{Source.of(where).unit}s are")
        notes.append(f"repaired: {rows} left out, from {left_out[0]} on: there is no earlier price to use instead")
    return frame, kept, notes


TAKEN = {
    "close": "the close before",
    "open": "the close before",
    "high": "the higher of open and close",
    "low": "the lower of open and close",
    "volume": "",
    "amount": "volume times the mean price",
}


def _changed(problem: Problem, frame: pd.DataFrame, kept: Any) -> str:
    """What the repair changed at the first place of a fault, in words."""
    if problem.kind == "unsorted":
        return "the rows are sorted by time"
    if problem.kind == "duplicate":
        return "the last row of each time is kept"
    rows = (kept == problem.line).nonzero()[0]
    if not len(rows):
        return "the row is left out"
    value = f"{frame[problem.column].iloc[rows[0]]:.9g}"
    if problem.kind == "upside-down":
        return f"high and low are swapped, the high is {value}"
    taken = TAKEN[problem.column]
    return f"it is now {value}" + (f", {taken}" if taken else "")


def require_rows(rows: int, need: int, where: str, what: str) -> None:
    if rows < need:
        raise InputError(f"{where} has {rows} usable rows; {what} needs at least {need}", hint="give a longer history")
