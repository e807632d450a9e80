"""The table of a forecast, with as many columns as fit the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from anytorch.cli.output import width_of

SHOWN = 12  # rows; of more, the first and the last
OFFSET = re.compile(r"[+-]\d\d:\d\d$")


def forecast_table(
    one: dict[str, Any], levels: Sequence[float], room: int | None
) -> tuple[list[str], list[list[str]], list[str]]:
    """Titles, rows, and the titles of the columns that were left out. `room`: characters in a line; None: all are shown.

    Times are shortened first (the title has the whole one), then columns go: volume, the inner quantiles, the mean.
    """
    fan = {f"close ({100 * level:g}%)": level for level in levels}
    values = {
        "close (mean)": [f"{row['close']:.6g}" for row in one["forecast"]],
        **{title: [f"{row['close']:.6g}" for row in one["quantiles"][f"{level:g}"]] for title, level in fan.items()},
        "volume (mean)": [f"{row['volume']:.6g}" for row in one["forecast"]],
    }
    times = [row["timestamp"] for row in one["forecast"]]
    for shown, written in product(choices(fan), (times, short(times), shorter(times))):
        titles = ["time", *shown]
        rows = cut([list(row) for row in zip(written, *(values[title] for title in shown), strict=True)])
        if room is None or width_of(titles, rows, folded=True) <= room:
            break
    return titles, rows, [title for title in values if title not in shown]  # if nothing fits, the narrowest


def choices(fan: dict[str, float]) -> Iterator[list[str]]:
    """Which columns to show beside the time: all, then ever fewer. `fan`: the quantiles' titles and levels."""
    mean, volume = "close (mean)", "volume (mean)"
    yield [mean, *fan, volume]
    yield [mean, *fan]
    kept = dict(fan)
    while len(kept) > 2:
        del kept[min(kept, key=lambda title: abs(kept[title] - 0.5))]
        yield [mean, *kept]
    if len(kept) == 2:
        yield list(kept)
    yield [mean]


def short(times: list[str]) -> list[str]:
    """The times without the parts all of them share: the time zone, full minutes, midnight."""
    offsets = {found.group() if (found := OFFSET.search(text)) else "" for text in times}
    if len(offsets) > 1:
        return times
    times = [OFFSET.sub("", text) for text in times]
    for same in (":00", " 00:00"):
        if all(text.endswith(same) for text in times):
            times = [text.removesuffix(same) for text in times]
    return times


def shorter(times: list[str]) -> list[str]:
    """The times without the year, if they span less than one."""
    times = short(times)
    first, last = times[0], times[-1]
    next_year = str(int(first[:4]) + 1)
    if last[:4] == first[:4] or (last[:4] == next_year and last[5:] < first[5:]):
        return [text[5:] for text in times]
    return times


def cut(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= SHOWN:
        return rows
    half = SHOWN // 2
    return [*rows[:half], ["…", *[""] * (len(rows[0]) - 1)], *rows[-half:]]
