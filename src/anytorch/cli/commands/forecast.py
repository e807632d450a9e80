"""`anytorch forecast`: read candles from a file; show the forecast as a table, a file and a picture."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import add_options

SAMPLE_ROWS = 600
DTYPES = ("float32", "bfloat16", "float16")
ROLLING = ("exact", "evict", "trim")
ROLLED = "what happens when the window is full; exact follows the paper, the others are faster"
FEW_ROWS = 64  # fewer are forecast from, but not without saying so


def arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        "data",
        ("file FILE", {"nargs": "?"}, "CSV, TSV, Parquet or Feather; - for standard input"),
        ("--sample", "forecast generated candles instead of a file"),
        ("--symbol NAME", "forecast only this instrument of the file"),
        ("--columns FIELD=NAME,…", "names of columns that are not recognised, as OURS=THEIRS"),
        ("--timezone ZONE", "time zone of the timestamps, such as Europe/Berlin"),
        ("--repair", "repair faulty data, and report each repair"),
        ("--holdout", "hold back the last HORIZON rows and compare the forecast with them"),
        "forecast",
        ("--horizon N", 24, limits.STEPS, "bars to forecast, up to 10,000 (default: 24)"),
        ("--samples N", 20, limits.PATHS, "paths to draw, up to 10,000 (default: 20)"),
        ("--quantiles Q,…", "0.1,0.5,0.9", "quantiles of the paths (default: 0.1,0.5,0.9)"),
        ("--lookback N", limits.WINDOW, "rows of history the model sees (default: what fits)"),
        ("--temperature T", 1.0, limits.TEMPERATURE_ABOVE_ZERO, "above 1: more spread; below 1: less"),
        ("--top-k N", 0, limits.TOP_K, "draw from the N likeliest tokens; 0: all; 1: deterministic"),
        ("--top-p P", 1.0, limits.SHARE, "below 1: leave out rare moves (default: 1.0)"),
        ("--rolling", {"default": "exact", "choices": ROLLING}, f"{', '.join(ROLLING)}: {ROLLED}"),
        ("--seed N", limits.SEED, "seed; the same paths on every device (default: random, and shown)"),
        "model",
        ("--model NAME", "tiny", "tiny, kronos-mini, -small, -base, or a folder"),
        ("--tokenizer NAME", "the tokenizer, for a model folder that names none"),
        ("--context N", limits.WINDOW, "rows of the model's window (default: its own)"),
        ("--dtype", {"choices": DTYPES}, f"{', '.join(DTYPES)}: the model's number format"),
        ("--quantization FORMAT", "compute with packed weights, such as int8"),
        ("--device DEVICE", "auto", "where to run (default: the best one)"),
        "answer",
        ("--output FILE", "write the forecast to this .csv, .parquet or .json file"),
        ("--plot FILE", "draw history, fan and volume to this .png or .svg file"),
    )


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.cli.forecast_request import check, check_bars, quantile_levels
    from anytorch.cli.requests import named_device

    levels = quantile_levels(options.quantiles)
    check(options)
    device = named_device(options.device, "--device")
    unsaid = options.seed is None
    options.seed = any_seed() if unsaid else options.seed
    series = read(options, output)
    check_bars(options, len(series))
    if unsaid:
        output.note(f"seed {options.seed}: --seed {options.seed} draws the same paths again")
    from anytorch.cli.forecast_answer import described, show, write
    from anytorch.forecast.checkpoints import choose_checkpoint, load_predictor

    own = choose_checkpoint(options.model, options.tokenizer).max_context
    with output.fallbacks_told() as warnings:
        predictor = load_predictor(
            options.model,
            options.tokenizer,
            device=device,
            max_context=options.context,
            dtype=options.dtype,
            quantization=options.quantization,
        )
    jobs = [histories(one, options, predictor.max_context) for one in series]
    told = [
        f"{one.name}: only {len(history)} rows of history, too few to estimate the series' scale and rhythm"
        for one, (history, _) in zip(series, jobs, strict=True)
        if len(history) < FEW_ROWS
    ]
    if options.lookback is not None and options.lookback > predictor.max_context:
        told.append(
            f"--lookback {options.lookback}: the model sees {predictor.max_context} rows; the last ones are used"
        )
    if predictor.max_context > own:
        told.append(f"--context {options.context}: {options.model} supports windows of at most {own} rows")
    for words in told:
        output.note(words)
    ahead = [times_ahead(one, actual, options) for one, (_, actual) in zip(series, jobs, strict=True)]
    forecasts = forecast(predictor, jobs, ahead, options, levels, output)
    problems = write(series, jobs, forecasts, options, output)
    document = {
        **{name: getattr(options, name) for name in ("model", "samples", "seed", "temperature", "top_k", "top_p")},
        **{name: getattr(options, name) for name in ("rolling", "quantization")},
        "device": str(predictor.device),
        "dtype": options.dtype or "float32",
        "warnings": warnings + told,
        **({"errors": problems} if problems else {}),
        "series": [described(one, *parts) for one, *parts in zip(series, jobs, forecasts, strict=True)],
    }
    if output.json:
        output.data(document)
    else:
        show(document, levels, output)
    for words in problems:
        output.note(f"error: {words}")
    return 1 if problems else 0


def any_seed() -> int:
    from secrets import randbelow

    return randbelow(2**32)


def forecast(
    predictor: Any,
    jobs: list[tuple[Any, Any]],
    ahead: list[Any],
    options: argparse.Namespace,
    levels: list[float],
    output: Output,
) -> list[Any]:
    from anytorch.devices.oom import is_out_of_memory
    from anytorch.errors import OutOfMemory, UsageError

    if options.rolling == "trim" and options.horizon >= predictor.max_context:
        raise UsageError(
            f"--rolling trim needs --horizon {options.horizon} below the window's {predictor.max_context} rows",
            hint="use --rolling exact or evict, or forecast fewer bars",
        )
    try:
        with output.progress("forecasting") as progress:
            found: list[Any] = predictor.forecast_batch(
                [history for history, _ in jobs],
                y_timestamp_list=ahead,
                pred_len=options.horizon,
                T=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                sample_count=options.samples,
                seed=options.seed,
                quantiles=levels,
                non_negative_volume=True,
                rescale=True,
                rolling=options.rolling,
                verbose=lambda done, total: progress(done, total, ""),
            )
    except (RuntimeError, MemoryError) as exc:
        if not is_out_of_memory(exc):
            raise
        raise OutOfMemory(
            f"{predictor.device} has too little memory for --samples {options.samples}, --horizon {options.horizon}",
            hint="ask for fewer samples or bars, or use another --device",
        ) from exc
    return found


def read(options: argparse.Namespace, output: Output) -> list[Any]:
    """Read the series to forecast; guesses about the data go to standard error."""
    from anytorch.errors import UsageError, did_you_mean
    from anytorch.forecast.candles.columns import parse_given
    from anytorch.forecast.candles.generate import sample_candles
    from anytorch.forecast.candles.read import newest_parts, read_many

    if options.sample:
        (made,) = read_many([sample_candles(SAMPLE_ROWS, seed=options.seed)])
        found = [replace(made, name="sample", where="the sample")]
        output.note("synthetic candles, one every 5 minutes")
    else:
        given = parse_given(options.columns) if options.columns else None
        found = read_many([options.file], columns=given, timezone=options.timezone, repair=options.repair)
    if options.symbol:
        names = [one.name for one in found]
        if options.symbol not in names:
            raise UsageError(
                f"--symbol {options.symbol}: the file has {', '.join(names[:10])}" + ("…" if len(names) > 10 else ""),
                hint=did_you_mean(options.symbol, names),
            )
        found = [one for one in found if one.name == options.symbol]
    found = newest_parts(found)
    for one in found[:3]:
        for note in one.notes:
            output.note(f"{one.name}: {note}" if len(found) > 1 else note)
    return found


def histories(one: Any, options: argparse.Namespace, context: int) -> tuple[Any, Any]:
    """The history the model sees, and the rows held back for comparison (None without --holdout)."""
    from anytorch.forecast.candles.read import require_rows

    held = options.horizon if options.holdout else 0
    require_rows(len(one), held + 2, one.where, "a forecast that is compared with the last rows" if held else "it")
    before, actual = one.frame.iloc[: len(one) - held], one.frame.iloc[len(one) - held :] if held else None
    lookback = min(options.lookback or max(context // 2, context - options.horizon), context)
    return before.iloc[-lookback:], actual


def times_ahead(one: Any, actual: Any, options: argparse.Namespace) -> Any:
    """The times to forecast: those of the rows held back, or the next ones in the rhythm of the whole series."""
    from pandas import DatetimeIndex  # type: ignore[import-untyped]

    return one.future(options.horizon) if actual is None else DatetimeIndex(actual["timestamps"])
