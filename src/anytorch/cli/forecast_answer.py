"""The output of `anytorch forecast`: a document, a table on the terminal, a file and a picture."""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from anytorch.cli.output import Output, width_of
from anytorch.counts import counted
from anytorch.errors import AnytorchError
from anytorch.files import replace_file
from anytorch.forecast.candles.picture import draw_forecast


def described(one: Any, job: tuple[Any, Any], forecast: Any) -> dict[str, Any]:
    history, actual = job
    document = {
        "name": one.name,
        "rows": len(one),
        "lookback": len(history),
        "frequency": str(one.rhythm),
        "guessed": list(one.notes),
        "last": {"timestamp": str(history["timestamps"].iloc[-1]), "close": float(history["close"].iloc[-1])},
        "forecast": records(forecast.mean),
        "quantiles": {f"{level:g}": records(frame) for level, frame in forecast.quantiles.items()},
    }
    if actual is not None:
        came = actual["close"].to_numpy()
        document["holdout"] = {
            "mean_absolute_error": float(abs(forecast.mean["close"].to_numpy() - came).mean()),
            "of_the_last_value": float(abs(history["close"].iloc[-1] - came).mean()),
        }
    return document


def unusual(document: dict[str, Any]) -> str:
    """The non-default settings the paths were drawn with, so that a saved answer says how it was made."""
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "rolling": "exact", "dtype": "float32", "quantization": None}
    return "".join(f", {name} {document[name]}" for name, value in usual.items() if document[name] != value)


def records(frame: Any) -> list[dict[str, Any]]:
    rows = frame.astype(float).to_dict("records")
    return [
        # A float32 has about nine digits; a price may be 1e-6, so digits count, not decimals.
        {"timestamp": str(time), **{name: float(f"{value:.9g}") for name, value in row.items()}}
        for time, row in zip(frame.index, rows, strict=True)
    ]


def table(series: list[Any], forecasts: list[Any]) -> Any:
    """One row per bar: the mean's columns by their names, a quantile's as close_q0.1, …"""
    import pandas as pd  # type: ignore[import-untyped]

    parts = []
    for one, forecast in zip(series, forecasts, strict=True):
        frame = forecast.mean.rename_axis("timestamps").reset_index()
        quantiles = {
            f"{column}_q{level:g}": values[column].to_numpy()
            for level, values in forecast.quantiles.items()
            for column in values.columns
        }
        frame = frame.assign(**quantiles)
        if len(series) > 1:
            frame.insert(0, "symbol", one.name)
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def write(
    series: list[Any], jobs: list[Any], forecasts: list[Any], options: argparse.Namespace, output: Output
) -> list[str]:
    """Write the requested file and picture; return what could not be written, and why. The answer is still shown."""
    problems = []
    for name, make in ((options.output, save), (options.plot, draw)):
        if name is None:
            continue
        try:
            output.note(make(series, jobs, forecasts, options))
        except OSError as exc:
            problems.append(f"{name} cannot be written: {exc.strerror or exc}")
        except AnytorchError as exc:
            problems.append(f"{name} was not written: {exc.message}")
    return problems


def save(series: list[Any], jobs: list[Any], forecasts: list[Any], options: argparse.Namespace) -> str:
    frame, path = table(series, forecasts), Path(options.output)
    if path.suffix.lower() == ".csv":
        body = frame.to_csv(index=False).encode()
    elif path.suffix.lower() == ".json":
        body = frame.to_json(orient="records", date_format="iso", indent=1).encode()
    else:
        buffer = io.BytesIO()
        frame.to_parquet(buffer)
        body = buffer.getvalue()
    replace_file(path, body)
    return f"forecast written to {path}"


def draw(series: list[Any], jobs: list[Any], forecasts: list[Any], options: argparse.Namespace) -> str:
    _, actual = jobs[0]
    before = series[0].frame if actual is None else series[0].frame.iloc[: -len(actual)]
    told = f"{counted(options.horizon, 'bar')} ahead, {counted(options.samples, 'path')} of {options.model}"
    title = f"{series[0].name}: {told}"
    path = draw_forecast(
        before, forecasts[0].mean, options.plot, quantiles=forecasts[0].quantiles, actual=actual, title=title
    )
    others = f" (of {series[0].name}; there are {len(series) - 1} more)" if len(series) > 1 else ""
    return f"picture written to {path}{others}"


def show(document: dict[str, Any], levels: list[float], output: Output) -> None:
    for one in document["series"]:
        title = f"{one['name']}: after {one['last']['timestamp']} (close {one['last']['close']:g})"
        columns, rows, left_out = forecast_table(one, levels, output.room)
        output.table(columns, rows, title=title)
        if left_out:
            output.text(f"  not shown: {', '.join(left_out)}")
        if "holdout" in one:
            errors = one["holdout"]
            output.text("  mean absolute error of the close, against the rows held back")
            output.pairs(
                [
                    ("of the forecast", f"{errors['mean_absolute_error']:.6g}"),
                    ("of the last value", f"{errors['of_the_last_value']:.6g}"),
                ],
                indent=4,
            )
    output.text()
    output.text(
        f"  {counted(document['samples'], 'path')} of {document['model']} on {document['device']}{unusual(document)}"
    )
    if document["model"] == "tiny":
        output.note("the tiny model was trained on synthetic candles only: use --model kronos-small for real prices")


# --- the table, with as many columns as fit the terminal --------------------------------------------------------------

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
