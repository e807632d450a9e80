"""POST /v1/forecast: takes candles as JSON or a CSV upload, returns forecast paths and quantiles."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.forecast.candles.read import CandleSeries, read_candles
from anytorch.forecast.candles.tables import extent, require_pandas
from anytorch.forecast.queue import Terms
from anytorch.serve import schemas
from anytorch.serve.bodies import parse_json
from anytorch.serve.loaders import ForecastModel
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem, clean, json_answer, problems, reading, validation_problem
from anytorch.serve.state import State, allowed_s
from anytorch.serve.threads import go_on

router = APIRouter(tags=["forecast"])
# What a form cannot say: lists of numbers.
ONLY_JSON = ("candles", "values", "timestamps")
FIELDS = schemas.ForecastRequest.model_json_schema()["properties"]
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/ForecastRequest"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "CSV text"},
                        **{name: field for name, field in FIELDS.items() if name not in ONLY_JSON},
                        "quantiles": {"type": "string", "description": "0.1,0.5,0.9"},
                    },
                    "additionalProperties": False,
                }
            },
        },
    }
}


@router.post(
    "/v1/forecast",
    openapi_extra=BODY,
    response_class=Response,
    responses={200: {"model": schemas.ForecastAnswer}, **problems(400, 401, 404, 413, 415, 422, 429, 503, 504)},
)
async def forecast(request: Request) -> Response:
    """Forecast candles. JSON, or multipart/form-data with a CSV `file` and the other fields beside it."""
    service: State = request.app.state.service
    began = time.perf_counter()
    asked = await read_body(request)
    check(asked, service.options)
    slot = service.models.slot("forecast", asked.model)
    with service.models.use(slot):
        model = await service.models.ready(slot)  # first: what is not installed is told before the candles are read
        series = await service.pools.candles.run(read, asked)
        assert isinstance(model, ForecastModel)
        context = model.predictor.max_context
        lookback = min(asked.lookback or max(context // 2, context - asked.horizon), context, len(series))
        terms = Terms(
            asked.horizon,
            asked.samples,
            tuple(sorted(set(asked.quantiles))),
            asked.temperature,
            asked.top_p,
            asked.seed,
        )
        limit_s = allowed_s(request, service.options)
        # By the rhythm of the whole history, not of the rows that the model sees.
        ahead = await service.pools.candles.run(series.future, asked.horizon)
        found = await asyncio.wrap_future(
            model.queue.submit(series.frame.iloc[-lookback:], terms, limit_s, ahead=ahead)
        )
        document = await service.pools.candles.run(answer_of, found, series, asked)
        warnings = list(found.warnings)
        if asked.lookback is not None and asked.lookback > context:
            warnings.append(f"lookback is {asked.lookback} and the model sees {context} rows: the last ones are used")
        if lookback < FEW_ROWS:
            warnings.append(f"only {lookback} rows of history: too few to estimate the series' scale and rhythm")
        if model.info.id == "tiny" and not asked.sample:
            warnings.append("this model was trained on synthetic candles only; load a Kronos model for real prices")
        return json_answer(
            {
                **document,
                "device": model.info.device,
                "device_warning": model.info.device_warning,
                "model": model.info.id,
                "seconds": round(time.perf_counter() - began, 4),
                "guessed": told(series.notes),
                "warnings": warnings,
            }
        )


def answer_of(found: Any, series: Any, asked: schemas.ForecastRequest) -> dict[str, Any]:
    require_finite(found)
    shown = series.frame.iloc[-SHOWN_ROWS:]
    document = {
        "name": series.name[:LONGEST_SYMBOL],
        "history": column_lists(shown, shown["timestamps"]),
        "forecast": column_lists(found.mean, found.mean.index),
        "quantiles": {named(level): column_lists(frame) for level, frame in found.quantiles.items()},
    }
    if asked.return_samples:
        document["samples"] = [
            {name: readable(path[:, place]) for place, name in enumerate(COLUMNS)} for path in found.samples
        ]
    return document


def told(notes: Sequence[str]) -> list[str]:
    """What was guessed and repaired, cut short: a file can have a fault in every row, and words of any length."""
    few = [note if len(note) <= LONGEST_NOTE else note[: LONGEST_NOTE - 1] + "…" for note in notes[:MOST_NOTES]]
    return few if len(notes) <= MOST_NOTES else [*few, f"and {len(notes) - MOST_NOTES} more"]


def named(level: float) -> str:
    """A quantile's key: all digits of it, so that no two levels share one; 0 and 1 without a point."""
    return repr(float(level)).removesuffix(".0")


async def read_body(request: Request) -> schemas.ForecastRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if kind == "multipart/form-data":
            return schemas.ForecastRequest.model_validate(await read_form(request))
        if kind not in ("application/json", ""):
            raise Problem(
                415, "unknown-body", "Unsupported content type", "send application/json or multipart/form-data"
            )
        body = await request.body()
        with reading("the body"):
            return schemas.ForecastRequest.model_validate(parse_json(body))
    except orjson.JSONDecodeError as exc:
        raise Problem(400, "not-json", "The body is not JSON", f"the body is not JSON: {exc}") from exc
    except ValidationError as exc:
        raise validation_problem(exc.errors(include_url=False, include_input=False, include_context=False)) from exc


async def read_form(request: Request) -> dict[str, Any]:
    """A form's fields as the equivalent JSON body."""
    values: dict[str, Any] = {}
    try:
        form = await request.form(
            max_files=1, max_fields=40, max_part_size=request.app.state.service.options.max_body_nbytes
        )
    except Problem:
        raise
    except Exception as exc:  # several kinds; all mean a malformed form
        raise Problem(400, "not-a-form", "The form cannot be read", "the multipart body is malformed") from exc
    try:
        for name, value in form.multi_items():
            given: Any = value
            if not isinstance(value, str):
                name, given = "csv", decode_upload(await value.read())
            elif name == "quantiles":
                given = [part for part in value.split(",") if part.strip()]
            elif value == "" and name in schemas.ForecastRequest.model_fields:
                continue  # as a page sends what was left empty
            if name in values:
                raise Problem(422, "invalid-body", "The body is invalid", "a field is given twice", param=name)
            values[name] = given
    finally:
        await form.close()
    return values


# --- a client's input (JSON columns, CSV text, an upload, or a sample) as a history to forecast -----------------------

GIVEN = ("candles", "values", "csv", "sample")
COLUMNS = ("open", "high", "low", "close", "volume", "amount")
LARGEST = 1e18  # its square is still a float32
SAMPLE_ROWS = 600
FEW_ROWS = 64  # fewer are forecast from, but not without saying so
SHOWN_ROWS = 2000  # of the history, in the answer
MOST_COLUMNS, MOST_CELLS = 500, 4_000_000  # of a CSV text: candles have 7 columns, and some files a few dozen more
MOST_NOTES, LONGEST_NOTE, LONGEST_SYMBOL = 50, 500, 200  # of what an answer says of the data
# Files that unpack to any size, or that a text cannot be: gzip, zip, Parquet, Arrow.
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"PAR1", b"ARROW1")


def check(asked: schemas.ForecastRequest, options: ServeOptions) -> None:
    """Raise a Problem for input that is missing or too large. Cheap: runs before anything is read."""
    given = [name for name in GIVEN if getattr(asked, name)]
    if not given and asked.csv is not None:
        raise Problem(422, "invalid-body", "The body is invalid", "csv is empty: send a header and rows", param="csv")
    if len(given) != 1:
        raise Problem(
            422, "invalid-body", "The body is invalid",
            f"send exactly one of {', '.join(GIVEN[:-1])} and {GIVEN[-1]}; sent: {', '.join(given) or 'none'}",
            param="candles",
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
    rows = len(asked.candles.timestamps) if asked.candles else len(asked.values or ()) or count_lines(asked.csv or "")
    if rows > options.max_forecast_rows:
        raise Problem(
            413, "too-many-rows", "Too many rows", f"{rows} rows of history; the limit is {options.max_forecast_rows}",
            hint="send the last few hundred rows: the model uses no more",
        )  # fmt: skip


def count_lines(text: str) -> int:
    """The line ends of a text, each of the three kinds that a CSV may have."""
    return text.count("\n") + text.count("\r") - text.count("\r\n")


def require_few_columns(text: str) -> None:
    """Raise a 413 Problem for a table that takes long to read for its size: pandas makes an object of every column."""
    rows, columns = extent(text)
    for what, count, most in (("columns", columns, MOST_COLUMNS), ("cells", rows * columns, MOST_CELLS)):
        if count > most:
            raise Problem(
                413, f"too-many-{what}", f"Too many {what}", f"up to {count} {what} in csv; the limit is {most}",
                hint="send the columns timestamps, open, high, low, close, volume and amount alone", param="csv",
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
    """Read the series to forecast. Slow: call it in a thread. Raises InputError with line and column, or a 400 Problem."""
    require_pandas()
    with reading("the history"):
        return history_of(asked)


def history_of(asked: schemas.ForecastRequest) -> CandleSeries:
    if asked.sample:
        table: Any = sample_candles(SAMPLE_ROWS, seed=(asked.seed or 0) % 2**31)
        name = "sample"
    elif asked.candles is not None:
        table, name = table_of(asked.candles), "candles"
    elif asked.values is not None:
        table, name = table_of_values(asked), "values"
    else:
        text = asked.csv or ""
        if text.lstrip("\ufeff").startswith(tuple(mark.decode("latin-1") for mark in PACKED)):
            raise InputError("csv is not text", hint="send plain CSV text")
        require_few_columns(text)
        table, name = text.encode("utf-8", "replace"), "csv"
    go_on()

    def choose(names: list[str]) -> list[str]:
        """The one that is meant; a part of it is called "NAME/2"."""
        if asked.symbol is None and len(names) > 1:
            raise InputError(f"the data has {len(names)} instruments: {some_of(names)}", hint="name one with `symbol`")
        symbol = names[0] if asked.symbol is None else asked.symbol
        if symbol in names:
            return [symbol]
        whole, _, number = symbol.rpartition("/")
        if whole not in names or not (number.isascii() and number.isdigit()):
            raise unknown_symbol(symbol, names)
        return [whole]

    (one,) = read_candles(table, timezone=asked.timezone, repair=asked.repair, choose=choose, newest=True)
    if asked.symbol is not None and asked.symbol not in (one.name, one.part_of):
        raise unknown_symbol(asked.symbol, [one.name])
    require_range(one.frame)
    return CandleSeries(
        name if one.name in ("the table", "the data") else one.name, one.frame, one.rhythm, one.notes, one.where
    )


def some_of(names: list[str]) -> str:
    return ", ".join(one[:100] for one in names[:10])


def unknown_symbol(symbol: str, names: list[str]) -> InputError:
    return InputError(f"unknown symbol {symbol[:100]!r}; known: {some_of(names)}")


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
    columns: dict[str, Any] = {
        "timestamps": [clean(one) if isinstance(one, str) else one for one in candles.timestamps]
    }
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


def table_of_values(asked: schemas.ForecastRequest) -> Any:
    """A series of single values, with its times where they are given."""
    values = asked.values or []
    if asked.timestamps is not None and len(asked.timestamps) != len(values):
        raise InputError(f"values has {len(values)} entries and timestamps has {len(asked.timestamps)}")
    times = {} if asked.timestamps is None else {"timestamps": [clean(one) for one in asked.timestamps]}
    return require_pandas().DataFrame({**times, "close": values})


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
