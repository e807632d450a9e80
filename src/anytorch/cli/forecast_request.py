"""Check the options of `anytorch forecast` before anything is read or computed; an error names its option."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from anytorch.cli.requests import new_file
from anytorch.errors import PackageMissing, UsageError
from anytorch.quant.formats import parse

# A forecast's paths are kept whole for their quantiles: about 100 bytes for a bar of one path.
MOST_BARS = 10_000_000


def check(options: argparse.Namespace) -> None:
    """Check the options; raises UsageError, also for an output that cannot be written."""
    check_bars(options, 1)
    if bool(options.file) == options.sample:
        raise UsageError(
            "give one file of candles, or --sample" + (", not both" if options.file else ""),
            hint="anytorch forecast prices.csv --horizon 24 --plot forecast.png",
        )
    if options.quantization is not None:
        check_quantization(options.quantization)
    for option, text, endings, package, extra in (
        ("--output", options.output, (".csv", ".parquet", ".json"), "pyarrow", "forecast"),
        ("--plot", options.plot, (".png", ".svg"), "matplotlib", "plot"),
    ):
        if text is None:
            continue
        suffix = Path(text).suffix.lower()
        if suffix not in endings:
            raise UsageError(
                f"{option} {text}: the name must end in {' or '.join((', '.join(endings[:-1]), endings[-1]))}"
            )
        new_file(text, option, source=options.file)
        if suffix in (".parquet", ".png", ".svg") and find_spec(package) is None:
            raise PackageMissing(f"{option} {text} needs {package}", hint=f"pip install 'anytorch[{extra}]'")


def check_bars(options: argparse.Namespace, series: int) -> None:
    bars = options.horizon * options.samples * series
    if bars > MOST_BARS:
        times = f" for each of {series} series" if series > 1 else ""
        raise UsageError(
            f"--horizon {options.horizon} × --samples {options.samples}{times} gives {bars:,} bars; "
            f"the limit is {MOST_BARS:,}",
            hint="ask for fewer samples" + (", or for one instrument with --symbol" if series > 1 else ""),
        )


def check_quantization(text: str) -> None:
    try:
        parse(text)
    except UsageError as exc:
        raise UsageError(f"--quantization {text}: {exc.message}", hint=exc.hint) from exc


def quantile_levels(text: str) -> list[float]:
    """The levels, each once and in order; at least one."""
    try:
        levels = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        levels = []
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise UsageError(
            f"--quantiles {text!r}: use numbers from 0 to 1, separated by commas",
            hint="--quantiles 0.5 gives only the median",
        )
    return levels
