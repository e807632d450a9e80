"""Turn a client's input (JSON columns, CSV text, an upload, or a sample) into a history to forecast."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.read import CandleSeries, newest_parts, read_candles
from anytorch.forecast.candles.tables import require_pandas
from anytorch.serve import schemas
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem

COLUMNS = ("open", "high", "low", "close", "volume", "amount")
LARGEST = 1e18  # its square is still a float32
SAMPLE_ROWS = 600
FEW_ROWS = 64  # fewer are forecast from, but not without saying so
SHOWN_ROWS = 2000  # of the history, in the answer
# Files that unpack to any size, or that a text cannot be: gzip, zip, Parquet, Arrow.
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"PAR1", b"ARROW1")


def check(asked: schemas.ForecastRequest, options: ServeOptions) -> None:
    """Raise a Problem for input that is missing or too large. Cheap: runs before anything is read."""
    given = [name for name in ("candles", "csv", "sample") if getattr(asked, name)]
    if len(given) != 1:
        raise Problem(
            422, "invalid-body", "The body is invalid",
            f"send exactly one of candles, csv and sample; sent: {', '.join(given) or 'none'}", param="candles",
        )  # fmt: skip
    for name, value, most in (
        ("horizon", asked.horizon, options.max_forecast_steps),
        ("samples", asked.samples, options.max_forecast_samples),
        ("lookback", asked.lookback or 0, options.max_forecast_rows),
    ):
        if value > most:
            raise Problem(
                422, "invalid-body", "The body is invalid", f"{name} is {value}; the limit is {most}", param=name
            )
    rows = len(asked.candles.timestamps) if asked.candles else (asked.csv or "").count("\n")
    if rows > options.max_forecast_rows:
        raise Problem(
            413, "too-many-rows", "Too many rows", f"{rows} rows of history; the limit is {options.max_forecast_rows}",
            hint="send the last few hundred rows: the model uses no more",
        )  # fmt: skip


def decode_upload(body: bytes) -> str:
    if body.startswith(PACKED):
        raise Problem(
            415, "not-text", "The file is not text", "the upload is compressed or binary", hint="send plain CSV text"
        )
    for encoding in ("utf-8-sig", "latin-1"):
        try:
            return body.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise AssertionError("latin-1 decodes everything")


def read(asked: schemas.ForecastRequest) -> CandleSeries:
    """Read the series to forecast. Slow: call it in a thread. Raises InputError with line and column."""
    require_pandas()
    if asked.sample:
        table: Any = sample_candles(SAMPLE_ROWS, seed=(asked.seed or 0) % 2**31)
        name = "sample"
    elif asked.candles is not None:
        table, name = table_of(asked.candles), "candles"
    else:
        text = asked.csv or ""
        if text.lstrip("\ufeff").startswith(tuple(mark.decode("latin-1") for mark in PACKED)):
            raise InputError("csv is not text", hint="send plain CSV text")
        table, name = text.encode("utf-8", "replace"), "csv"
    found = newest_parts(read_candles(table, timezone=asked.timezone, repair=asked.repair))
    names = [one.name for one in found]
    if asked.symbol is not None:
        found = [one for one in found if one.name == asked.symbol]
        if not found:
            raise InputError(f"unknown symbol {asked.symbol[:100]!r}; known: {', '.join(names[:10])}")
    elif len(found) > 1:
        raise InputError(
            f"the data has {len(found)} instruments: {', '.join(names[:10])}", hint="name one with `symbol`"
        )
    one = found[0]
    require_range(one.frame)
    return CandleSeries(
        name if one.name in ("the table", "the data") else one.name, one.frame, one.rhythm, one.notes, one.where
    )


def require_range(frame: Any) -> None:
    """Raise InputError for numbers too large for float32, in which the model computes and sums squares."""
    for name in COLUMNS:
        if name in frame and (large := frame[name].abs() > LARGEST).any():
            row = int(large.to_numpy().argmax())
            raise InputError(
                f"row {row + 1}, column {name!r}: {frame[name].iloc[row]:g} is too large, the largest is {LARGEST:g}",
                hint="send prices in another unit",
            )


def require_finite(found: Any) -> None:
    """Raise InputError for a forecast with NaN or infinities, which JSON would turn into null."""
    if not np.isfinite(found.mean[[name for name in COLUMNS if name in found.mean]].to_numpy()).all():
        raise InputError(
            "the forecast is not finite: the history's numbers are too far apart", hint="check the history"
        )


def table_of(candles: schemas.Candles) -> Any:
    columns: dict[str, Any] = {"timestamps": candles.timestamps}
    for name in COLUMNS:
        values = getattr(candles, name)
        if values is None:
            continue
        if len(values) != len(candles.timestamps):
            raise InputError(f"candles.{name} has {len(values)} values and timestamps has {len(candles.timestamps)}")
        columns[name] = values
    # As text, the way a file would bring it: one reader decides about formats, and names the row that is wrong.
    frame = require_pandas().DataFrame(columns)
    buffer = io.StringIO()
    frame.to_csv(buffer, index=False)
    return buffer.getvalue().encode()


def column_lists(frame: Any, timestamps: Any = None) -> dict[str, Any]:
    """A DataFrame as the lists of an answer."""
    document: dict[str, Any] = {}
    if timestamps is not None:
        document["timestamps"] = [moment.isoformat() for moment in timestamps]
    for name in COLUMNS:
        document[name] = readable(frame[name].to_numpy()) if name in frame else None
    return document


def readable(values: Any) -> list[float]:
    """Numbers with the nine digits that a float32 can hold: prices of 8e-6 keep theirs, and 101.65 stays short."""
    return [float(f"{value:.9g}") for value in values]
