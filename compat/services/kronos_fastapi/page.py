"""The original web page's paths and bodies, on the models and the queue of the anytorch service.

POST /api/load-model {"model_key": "kronos-small", "device": "cpu"}    also {"model": …} as anytorch's own
GET  /api/available-models, /api/model-status, /api/data-files
POST /api/load-data {"file_path": …}
POST /api/predict   {"file_path", "lookback", "pred_len", "temperature", "top_p", "sample_count", "start_date"}

A file is one of the data folder's, by its name or its path: nothing else of the disk can be read. Errors have the page's
`error`. Unlike the original, a forecast carries the times it is for: those after its history.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from anytorch.errors import AnytorchError
from anytorch.forecast.candles.read import CandleSeries, read_candles
from anytorch.forecast.model.pretrained import PUBLISHED
from anytorch.forecast.queue import Terms
from anytorch.serve.loaders import ForecastModel
from anytorch.serve.problems import Problem
from anytorch.serve.state import State, allowed_s

LOOKBACK, PRED_LEN = 400, 120
PREDICT = ("file_path", "lookback", "pred_len", "temperature", "top_p", "sample_count", "start_date")
KINDS = (".csv", ".feather", ".parquet")
COLUMNS = ("open", "high", "low", "close", "volume", "amount")
PARAMETERS = {"kronos-mini": "4.1M", "kronos-small": "24.7M", "kronos-base": "102.3M"}
DESCRIPTIONS = {
    "kronos-mini": "Lightweight model, suitable for fast prediction",
    "kronos-small": "Small model, balanced performance and speed",
    "kronos-base": "Base model, provides better prediction quality",
    "tiny": "Built in, trained on synthetic candles: shows how it works",
}


class PageError(Exception):
    """What the page shows: a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def known_models() -> dict[str, dict[str, Any]]:
    published = {
        name: {
            "name": pair.model.rpartition("/")[2],
            "model_id": pair.model,
            "tokenizer_id": pair.tokenizer,
            "context_length": pair.max_context,
            "params": PARAMETERS[name],
            "description": DESCRIPTIONS[name],
        }
        for name, pair in PUBLISHED.items()
    }
    tiny = {"name": "tiny", "context_length": 128, "params": "0.3M", "description": DESCRIPTIONS["tiny"]}
    return {**published, "tiny": {**tiny, "model_id": "tiny", "tokenizer_id": "tiny"}}


def as_the_page_expects(end_point: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Failures as {"error": …}, which is what the page reads."""

    @wraps(end_point)
    async def run(request: Request) -> Any:
        try:
            return await end_point(request)
        except PageError as exc:
            return JSONResponse({"error": str(exc)}, exc.status)
        except Problem as exc:
            return JSONResponse({"error": sentences(exc.detail, exc.hint)}, exc.status)
        except AnytorchError as exc:
            return JSONResponse({"error": sentences(exc.message, exc.hint)}, 400)

    return run


def sentences(message: str, hint: str) -> str:
    return f"{message.rstrip('.')}. {hint[:1].upper()}{hint[1:]}" if hint else message


async def body_of(request: Request, *fields: str) -> dict[str, Any]:
    """The body, a JSON object of these fields. What is misspelt is refused: it would be ignored otherwise."""
    try:
        body = await request.json()
    except ValueError as exc:
        raise PageError(400, f"the body is not JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise PageError(400, "the body must be a JSON object")
    unknown = [name[:100] for name in body if name not in fields]
    if unknown:
        raise PageError(422, f"unknown field {unknown[0]!r}; use {', '.join(fields)}")
    return body


def number(body: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    try:
        value = float(body.get(name, default))
    except (TypeError, ValueError) as exc:
        raise PageError(400, f"{name} is {str(body[name])[:100]!r}, not a number") from exc
    if not (math.isfinite(value) and least <= value <= most):
        raise PageError(400, f"{name} is {value:,.12g}; use a number from {least:,g} to {most:,g}")
    return value


def whole_number(body: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = number(body, name, default, least, most)
    if not value.is_integer():
        raise PageError(400, f"{name} is {value:g}; use a whole number")
    return int(value)


class DataFolder:
    """The files the page may read."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def files(self) -> list[dict[str, str]]:
        if self.folder is None:
            return []
        return [
            {"name": path.name, "path": str(path), "size": size_of(path.stat().st_size)}
            for path in sorted(self.folder.iterdir())
            if path.suffix.lower() in KINDS and path.is_file()
        ]

    def read(self, name: Any) -> CandleSeries:
        if not name or not isinstance(name, str):
            raise PageError(400, "File path cannot be empty")
        path = next((Path(one["path"]) for one in self.files() if name in (one["name"], one["path"])), None)
        if path is None:
            where = "KRONOS_DATA_FOLDER is not set" if self.folder is None else f"it is not in {self.folder}"
            raise PageError(400, f"{name[:200]!r} cannot be read: {where}")
        return read_candles(path, newest=True)[0]


def size_of(nbytes: int) -> str:
    return f"{nbytes / 1024:.1f} KB" if nbytes < 2**20 else f"{nbytes / 2**20:.1f} MB"


def page_routes(data_folder: Path | None) -> APIRouter:
    """The end points, reading candles from this folder alone."""
    router = APIRouter(tags=["kronos page"])
    data = DataFolder(data_folder)

    def post(path: str, end_point: Callable[..., Awaitable[Any]]) -> None:
        router.add_api_route(path, as_the_page_expects(end_point), methods=["POST"], response_model=None)

    def get(path: str, end_point: Callable[..., Awaitable[Any]]) -> None:
        router.add_api_route(path, as_the_page_expects(end_point), methods=["GET"], response_model=None)

    async def data_files(request: Request) -> Any:
        return await asyncio.to_thread(data.files)

    async def load_data(request: Request) -> Any:
        series = await asyncio.to_thread(data.read, (await body_of(request, "file_path")).get("file_path"))
        return {
            "success": True,
            "data_info": about(series),
            "message": f"Successfully loaded data, total {len(series)} rows",
        }

    async def predict(request: Request) -> Any:
        return await predicted(request, await body_of(request, *PREDICT), data)

    get("/api/data-files", data_files)
    get("/api/available-models", available_models)
    get("/api/model-status", model_status)
    post("/api/load-data", load_data)
    post("/api/load-model", load_model)
    post("/api/predict", predict)
    return router


async def available_models(request: Request) -> Any:
    return {"models": known_models(), "model_available": True}


async def model_status(request: Request) -> Any:
    service: State = request.app.state.service
    loaded = [info for info in service.models.infos() if info.job == "forecast" and info.loaded]
    if not loaded:
        return {"available": True, "loaded": False, "message": "Kronos model available but not loaded"}
    info = next((one for one in loaded if one.default), loaded[0])
    return {
        "available": True,
        "loaded": True,
        "message": "Kronos model loaded and available",
        "current_model": {"name": info.id, "device": info.device, "device_warning": info.device_warning},
    }


async def load_model(request: Request) -> Any:
    service: State = request.app.state.service
    body = await body_of(request, "model_key", "model", "device")
    key = body.get("model_key") or body.get("model") or "kronos-small"
    if not isinstance(key, str):
        raise PageError(400, f"model_key is {str(key)[:100]!r}, not a name")
    device = body.get("device")
    if device is not None and not isinstance(device, str):
        raise PageError(400, f"device is {str(device)[:100]!r}, not a name")
    names = [one.id for one in (await service.pools.questions.run(service.models.loadable)).values()]
    # The page's key and the folder's name differ in their case: kronos-small, Kronos-small.
    name = next((one for one in names if one.rpartition("/")[2].lower() == key.rpartition("/")[2].lower()), key)
    slot = await service.models.load(name, "forecast", device, None, service.tell_others)
    info = slot.info(default=True)
    about_model = known_models().get(key.lower(), {"name": info.id, "params": str(info.parameters)})
    return {
        "success": True,
        "message": f"Model loaded successfully: {about_model['name']} ({about_model['params']}) on {info.device}",
        "model_info": {
            "name": about_model["name"],
            "params": about_model["params"],
            "context_length": info.max_length,
            "description": about_model.get("description", ""),
        },
        "device": info.device,
        "device_warning": info.device_warning,
    }


def about(series: CandleSeries) -> dict[str, Any]:
    frame = series.frame
    prices = frame[["open", "high", "low", "close"]]
    step = frame["timestamps"].diff().dropna().median() if len(frame) > 1 else None
    return {
        "rows": len(frame),
        "columns": list(frame.columns),
        "start_date": frame["timestamps"].min().isoformat(),
        "end_date": frame["timestamps"].max().isoformat(),
        "price_range": {"min": float(prices.min().min()), "max": float(prices.max().max())},
        "prediction_columns": [name for name in COLUMNS[:5] if name in frame.columns],
        "timeframe": "Unknown" if step is None else in_words(step.total_seconds()),
        "notes": list(series.notes),
    }


def in_words(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


async def predicted(request: Request, body: dict[str, Any], data: DataFolder) -> Any:
    service: State = request.app.state.service
    options = service.options
    lookback = whole_number(body, "lookback", LOOKBACK, 2, options.max_forecast_rows)
    horizon = whole_number(body, "pred_len", PRED_LEN, 1, options.max_forecast_steps)
    samples = whole_number(body, "sample_count", 1, 1, options.max_forecast_samples)
    terms = Terms(
        horizon, samples, (), number(body, "temperature", 1.0, 0.01, 10.0), number(body, "top_p", 0.9, 0.01, 1.0)
    )
    series = await asyncio.to_thread(data.read, body.get("file_path"))
    frame, kind = window(series, body.get("start_date"), lookback, horizon)
    slot = service.models.slot("forecast", None)
    with service.models.use(slot):
        model = await service.models.ready(slot)
        assert isinstance(model, ForecastModel)
        history, actual = frame.iloc[:lookback], frame.iloc[lookback : lookback + horizon]
        ahead = actual["timestamps"] if len(actual) == horizon else series.future(horizon)
        waiting = model.queue.submit(history, terms, allowed_s(request, options), ahead=ahead)
        found = await asyncio.wrap_future(waiting)
    results = rows_of(found.mean, list(found.mean.index))
    actual_rows = rows_of(actual, list(actual["timestamps"])) if len(actual) == horizon else []
    compared = f", including {len(actual_rows)} actual data points for comparison" if actual_rows else ""
    return {
        "success": True,
        "prediction_type": kind,
        "chart": json.dumps(chart(history, results, actual_rows)),  # a text, as the page parses it
        "prediction_results": results,
        "actual_data": actual_rows,
        "has_comparison": bool(actual_rows),
        "message": f"Prediction completed, generated {len(results)} prediction points{compared}",
        "device": model.info.device,
    }


def window(series: CandleSeries, start: Any, lookback: int, horizon: int) -> tuple[Any, str]:
    """The rows a forecast looks at, and those after them that it can be compared with; and what the page calls it."""
    import pandas as pd

    frame = series.frame
    if start:
        try:
            begin = pd.Timestamp(start if isinstance(start, str) else "")
        except ValueError as exc:
            raise PageError(400, f"start_date {str(start)[:100]!r} is not a time") from exc
        if begin is pd.NaT:
            raise PageError(400, f"start_date {str(start)[:100]!r} is not a time")
        zone = frame["timestamps"].dt.tz
        if begin.tzinfo is None and zone is not None:
            begin = begin.tz_localize(zone)
        elif begin.tzinfo is not None and zone is None:
            begin = begin.tz_convert("UTC").tz_localize(None)
        frame = frame[frame["timestamps"] >= begin]
        if len(frame) < lookback + horizon:
            raise PageError(
                400, f"Insufficient data from {begin}, need at least {lookback + horizon} rows, found {len(frame)}"
            )
        return frame.iloc[: lookback + horizon], "Kronos model prediction (within the selected window)"
    if len(frame) < lookback:
        raise PageError(400, f"Insufficient data length, need at least {lookback} rows")
    # With enough rows the last ones are kept to compare with, as the page does; else the forecast goes beyond the file.
    rows = lookback + horizon if len(frame) >= lookback + horizon else lookback
    return frame.iloc[-rows:], "Kronos model prediction (latest data)"


def rows_of(frame: Any, times: list[Any]) -> list[dict[str, Any]]:
    return [
        {"timestamp": time.isoformat(), **{name: float(row[name]) if name in row else 0.0 for name in COLUMNS}}
        for time, (_, row) in zip(times, frame.iterrows(), strict=True)
    ]


def chart(history: Any, results: list[dict[str, Any]], actual: list[dict[str, Any]]) -> dict[str, Any]:
    """A figure as plotly's JavaScript draws it."""
    past = rows_of(history, list(history["timestamps"]))
    traces = [("Historical data", past), ("Prediction", results), ("Actual data", actual)]
    return {
        "data": [
            {
                "type": "candlestick",
                "name": f"{name} ({len(rows)} points)",
                "x": [row["timestamp"] for row in rows],
                **{column: [row[column] for row in rows] for column in COLUMNS[:4]},
            }
            for name, rows in traces
            if rows
        ],
        "layout": {"title": {"text": "Kronos forecast"}, "xaxis": {"rangeslider": {"visible": False}}},
    }
