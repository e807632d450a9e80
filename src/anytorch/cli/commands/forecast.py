"""`anytorch forecast`: from a file of candles to a table, a file and a picture of what may come."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from anytorch.cli.output import Output
from anytorch.counts import counted

SAMPLE_ROWS = 600
FEW_ROWS = 64  # fewer are forecast from, but not without saying so


def arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("file", nargs="?", metavar="FILE", help="CSV, TSV, Parquet or Feather; - for standard input")
    data.add_argument("--sample", action="store_true", help="forecast generated candles instead of a file")
    data.add_argument("--symbol", metavar="NAME", help="of several instruments in the file, this one alone")
    data.add_argument("--columns", metavar="FIELD=NAME,…", help="columns whose names are not understood")
    data.add_argument("--timezone", metavar="ZONE", help="of the timestamps, such as Europe/Berlin")
    data.add_argument("--repair", action="store_true", help="mend what is wrong with the data, and say what was mended")
    data.add_argument("--holdout", action="store_true", help="keep the last HORIZON rows back and compare with them")
    what = parser.add_argument_group("forecast")
    what.add_argument("--horizon", type=int, default=24, metavar="N", help="bars to forecast (default: 24)")
    what.add_argument("--samples", type=int, default=20, metavar="N", help="paths to draw (default: 20)")
    what.add_argument("--quantiles", default="0.1,0.5,0.9", metavar="Q,…", help="of the paths (default: 0.1,0.5,0.9)")
    what.add_argument("--lookback", type=int, metavar="N", help="rows of history the model sees (default: what fits)")
    what.add_argument("--temperature", type=float, default=1.0, metavar="T", help="above 1 wilder, below 1 tamer")
    what.add_argument("--top-p", type=float, default=1.0, metavar="P", help="below 1 rare moves are cut (default: 1.0)")
    what.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same paths on every device")
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="tiny", metavar="NAME", help="tiny, kronos-mini, -small, -base, or a folder")
    model.add_argument("--tokenizer", metavar="NAME", help="for a folder that does not name its own")
    model.add_argument("--context", type=int, metavar="N", help="rows of the model's window (default: its own)")
    model.add_argument("--device", default="auto", metavar="DEVICE", help="where to run (default: the best one)")
    where = parser.add_argument_group("answer")
    where.add_argument("--output", metavar="FILE", help="write the forecast to this .csv, .parquet or .json file")
    where.add_argument("--plot", metavar="FILE", help="draw history, fan and volume to this .png or .svg file")


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.cli.requests import named_device, new_file
    from anytorch.errors import UsageError

    levels = quantile_levels(options.quantiles)
    if options.horizon < 1 or options.samples < 1:
        raise UsageError(f"--horizon {options.horizon}, --samples {options.samples}: use whole numbers above 0")
    if bool(options.file) == options.sample:
        raise UsageError(
            "give one file of candles, or --sample" + (", not both" if options.file else ""),
            hint="anytorch forecast prices.csv --horizon 24 --plot forecast.png",
        )
    if options.plot and not options.plot.lower().endswith((".png", ".svg")):
        raise UsageError(f"--plot {options.plot}: the name must end in .png or .svg")
    if options.output and not options.output.lower().endswith((".csv", ".parquet", ".json")):
        raise UsageError(f"--output {options.output}: the name must end in .csv, .parquet or .json")
    for option, text in (("--output", options.output), ("--plot", options.plot)):
        if text is not None:
            new_file(text, option)
    series = read(options, output)
    from anytorch.engines.forecast.checkpoints import load_predictor

    with output.fallbacks_told() as warnings:
        predictor = load_predictor(
            options.model,
            options.tokenizer,
            device=named_device(options.device, "--device"),
            max_context=options.context,
        )
    jobs = [histories(one, options, predictor.max_context) for one in series]
    for one, (history, _) in zip(series, jobs, strict=True):
        if len(history) < FEW_ROWS:
            short = f"{one.name}: only {len(history)} rows of history, too few to know the series' scale and rhythm by"
            output.note(short)
            warnings.append(short)
    forecasts = predictor.predict_batch(
        [history for history, _ in jobs],
        pred_len=options.horizon,
        T=options.temperature,
        top_p=options.top_p,
        sample_count=options.samples,
        seed=options.seed,
        quantiles=levels,
        non_negative_volume=True,
        verbose=not output.json,
    )
    if options.output:
        output.note(f"forecast written to {save(series, forecasts, options.output)}")
    if options.plot:
        draw(series, jobs, forecasts, options, output)
    document = {
        "model": options.model,
        "device": str(predictor.device),
        "samples": options.samples,
        "seed": options.seed,
        "warnings": warnings,
        "series": [described(one, *parts) for one, *parts in zip(series, jobs, forecasts, strict=True)],
    }
    if output.json:
        output.data(document)
    else:
        show(document, levels, output)
    return 0


def quantile_levels(text: str) -> list[float]:
    from anytorch.errors import UsageError

    try:
        levels = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        levels = [-1.0]
    if not all(0 <= level <= 1 for level in levels):
        raise UsageError(f"--quantiles {text}: use numbers from 0 to 1, separated by commas")
    return levels


def read(options: argparse.Namespace, output: Output) -> list[Any]:
    """The series to forecast; what was guessed about them goes to standard error."""
    from anytorch.engines.candles.columns import parse_given
    from anytorch.engines.candles.generate import sample_candles
    from anytorch.engines.candles.read import read_many
    from anytorch.errors import UsageError

    if options.sample:
        (made,) = read_many([sample_candles(SAMPLE_ROWS, seed=options.seed or 0)])
        found = [replace(made, name="sample", where="the sample")]
        output.note("generated candles: every 5 minutes, of nothing that exists")
    else:
        given = parse_given(options.columns) if options.columns else None
        found = read_many([options.file], columns=given, timezone=options.timezone, repair=options.repair)
    if options.symbol:
        names = [one.name for one in found]
        if options.symbol not in names:
            import difflib

            near = difflib.get_close_matches(options.symbol, names, n=1)
            raise UsageError(
                f"--symbol {options.symbol}: the file has {', '.join(names[:10])}" + ("…" if len(names) > 10 else ""),
                hint=f"did you mean {near[0]!r}?" if near else "",
            )
        found = [one for one in found if one.name == options.symbol]
    if options.repair:  # where it was cut at a huge gap, what came before says little about what comes next
        latest = {one.name.split("/")[0]: one for one in found}
        found = list(latest.values())
    for one in found[:3]:
        for note in one.notes:
            output.note(f"{one.name}: {note}" if len(found) > 1 else note)
    return found


def histories(one: Any, options: argparse.Namespace, context: int) -> tuple[Any, Any]:
    """What the model sees, and what really came after it (None unless it is held back)."""
    from anytorch.engines.candles.check import require_rows

    held = options.horizon if options.holdout else 0
    require_rows(len(one), held + 2, one.where, "a forecast that is compared with the last rows" if held else "it")
    before, actual = one.frame.iloc[: len(one) - held], one.frame.iloc[len(one) - held :] if held else None
    lookback = options.lookback or max(context // 2, context - options.horizon)
    return before.iloc[-lookback:], actual


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


def records(frame: Any) -> list[dict[str, Any]]:
    rows = frame.astype(float).to_dict("records")
    return [
        {"timestamp": str(time), **{name: round(value, 6) for name, value in row.items()}}
        for time, row in zip(frame.index, rows, strict=True)
    ]


def table(series: list[Any], forecasts: list[Any]) -> Any:
    """One row per bar: the mean's columns by their names, a quantile's as close_q0.1, …"""
    import pandas as pd  # type: ignore[import-untyped]

    parts = []
    for one, forecast in zip(series, forecasts, strict=True):
        frame = forecast.mean.rename_axis("timestamps").reset_index()
        for level, values in forecast.quantiles.items():
            for column in ("open", "high", "low", "close", "volume"):
                frame[f"{column}_q{level:g}"] = values[column].to_numpy()
        if len(series) > 1:
            frame.insert(0, "symbol", one.name)
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)


def save(series: list[Any], forecasts: list[Any], name: str) -> Path:
    import io

    from anytorch.files import replace_file

    frame, path = table(series, forecasts), Path(name)
    if path.suffix.lower() == ".csv":
        body = frame.to_csv(index=False).encode()
    elif path.suffix.lower() == ".json":
        body = frame.to_json(orient="records", date_format="iso", indent=1).encode()
    else:
        buffer = io.BytesIO()
        frame.to_parquet(buffer)
        body = buffer.getvalue()
    replace_file(path, body)
    return path


def draw(series: list[Any], jobs: list[Any], forecasts: list[Any], options: Any, output: Output) -> None:
    from anytorch.engines.candles.picture import draw_forecast

    _, actual = jobs[0]
    before = series[0].frame if actual is None else series[0].frame.iloc[: -len(actual)]
    told = f"{counted(options.horizon, 'bar')} ahead, {counted(options.samples, 'path')} of {options.model}"
    title = f"{series[0].name}: {told}"
    path = draw_forecast(
        before, forecasts[0].mean, options.plot, quantiles=forecasts[0].quantiles, actual=actual, title=title
    )
    others = f" (of {series[0].name}; there are {len(series) - 1} more)" if len(series) > 1 else ""
    output.note(f"picture written to {path}{others}")


def show(document: dict[str, Any], levels: list[float], output: Output) -> None:
    from anytorch.cli.forecast_table import forecast_table

    for one in document["series"]:
        title = f"{one['name']}: after {one['last']['timestamp']} (close {one['last']['close']:g})"
        columns, rows, left_out = forecast_table(one, levels, output.room)
        output.table(columns, rows, title=title)
        if left_out:
            output.text(f"  not shown: {', '.join(left_out)}")
        if "holdout" in one:
            errors = one["holdout"]
            output.text(
                f"  mean absolute error of the close against what came: {errors['mean_absolute_error']:.6g}; "
                f"of the last value: {errors['of_the_last_value']:.6g}"
            )
    output.text()
    output.text(f"  {counted(document['samples'], 'path')} of {document['model']} on {document['device']}")
    if document["model"] == "tiny":
        output.note("tiny has seen generated candles alone: use --model kronos-small for real prices")
