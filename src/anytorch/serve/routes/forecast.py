"""POST /v1/forecast: takes candles as JSON or a CSV upload, returns forecast paths and quantiles."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from anytorch.forecast.queue import Terms
from anytorch.serve import candle_input, schemas
from anytorch.serve.answers import json_answer, problems
from anytorch.serve.loaders import ForecastModel
from anytorch.serve.problems import Problem, validation_problem
from anytorch.serve.reading import parse_json
from anytorch.serve.state import State, allowed_s

router = APIRouter(tags=["forecast"])
BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/ForecastRequest"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary", "description": "CSV text"},
                        "horizon": {"type": "integer", "minimum": 1},
                        "samples": {"type": "integer", "minimum": 1},
                        "quantiles": {"type": "string", "description": "0.1,0.5,0.9"},
                        "seed": {"type": "integer", "minimum": 0},
                    },
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
    candle_input.check(asked, service.options)
    slot = service.models.slot("forecast", asked.model)
    with service.models.use(slot):
        model = await service.models.ready(slot)  # first: what is not installed is told before the candles are read
        series = await asyncio.to_thread(candle_input.read, asked)
        assert isinstance(model, ForecastModel)
        context = model.predictor.max_context
        lookback = min(asked.lookback or max(context // 2, context - asked.horizon), len(series))
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
        ahead = await asyncio.to_thread(series.future, asked.horizon)
        found = await asyncio.wrap_future(
            model.queue.submit(series.frame.iloc[-lookback:], terms, limit_s, ahead=ahead)
        )
        document = await asyncio.to_thread(answer_of, found, series, asked)
        warnings = []
        if lookback < candle_input.FEW_ROWS:
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
                "guessed": list(series.notes),
                "warnings": warnings,
            }
        )


def answer_of(found: Any, series: Any, asked: schemas.ForecastRequest) -> dict[str, Any]:
    candle_input.require_finite(found)
    shown = series.frame.iloc[-candle_input.SHOWN_ROWS :]
    document = {
        "name": series.name,
        "history": candle_input.column_lists(shown, shown["timestamps"]),
        "forecast": candle_input.column_lists(found.mean, found.mean.index),
        "quantiles": {named(level): candle_input.column_lists(frame) for level, frame in found.quantiles.items()},
    }
    if asked.return_samples and found.samples is not None:
        document["samples"] = [
            {name: candle_input.readable(path[:, place]) for place, name in enumerate(candle_input.COLUMNS)}
            for path in found.samples
        ]
    return document


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
        return schemas.ForecastRequest.model_validate(parse_json(await request.body()))
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
            if not isinstance(value, str):
                values["csv"] = candle_input.decode_upload(await value.read())
            elif name == "quantiles":
                values["quantiles"] = [part for part in value.split(",") if part.strip()]
            elif value != "" and name not in ("candles", "csv"):
                values[name] = value
    finally:
        await form.close()
    return values
