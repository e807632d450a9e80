"""Fine-tune the tiny model on generated candles, and see on a held-out period whether it beats what costs nothing.

OMP_NUM_THREADS=1 python examples/finetune_forecast.py --output /tmp/finetune     (about seven minutes of one CPU core)

Sixteen instruments of hourly bars; the first 60 % train, the next 10 % choose the best weights, the last 30 % are never
looked at until the end. Nearly all of a move is undone again within hours, as in the difference of two prices that belong
together, so there is something to find in the price; in a single real price there is far less.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anytorch.files import replace_file
from anytorch.forecast.candles.generate import Recipe, sample_market
from anytorch.forecast.checkpoints import choose_checkpoint, load_predictor
from anytorch.forecast.training import finetune_predictor
from anytorch.forecast.training.scores import Comparison, compare
from anytorch.forecast.training.windows import as_series

LOOKBACK, HORIZON, SEASON = 96, 24, 24
SHARES = {"validation": 0.1, "test": 0.3}


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--windows", type=int, default=120, help="of the held-out period")
    parser.add_argument("--seed", type=int, default=11)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train, score before and after, and return what came of it."""
    recipe = Recipe(reversion=0.97, half_life=4.0)
    market = sample_market(16, 6000, seed=options.seed, freq="1h", session="always", recipe=recipe)
    series = as_series(market)
    start = choose_checkpoint("tiny")
    done = finetune_predictor(
        series,
        output=options.output / "model",
        model=start.model,
        tokenizer=start.tokenizer,
        lookback=LOOKBACK,
        horizon=HORIZON,
        epochs=1,
        steps_per_epoch=options.steps,
        evaluate_every=max(options.steps // 4, 1),
        validation_windows=200,
        learning_rate=5e-4,
        mixed_precision=False,
        device=options.device,
        progress=lambda now, total, what: print(f"\r{now}/{total} {what}", end="", flush=True),
        **SHARES,
    )
    print(f"\nvalidation loss: {done.first_loss:.4f} before, {done.best_loss:.4f} at step {done.best_step}")
    results = {}
    for name, model in (("before", start.model), ("fine-tuned", done.folder)):
        predictor = load_predictor(model, start.tokenizer, device=options.device, max_context=LOOKBACK + HORIZON)
        results[name] = compare(
            predictor,
            series,
            lookback=LOOKBACK,
            horizon=HORIZON,
            season=SEASON,
            samples=50,
            most_windows=options.windows,
            top_p=1.0,
            **SHARES,
        )
        show(name, results[name])
    body: dict[str, Any] = {
        name: {**asdict(found), "scores": [asdict(s) for s in found.scores]} for name, found in results.items()
    }
    body["validation_loss"] = {"before": done.first_loss, "best": done.best_loss, "at_step": done.best_step}
    replace_file(options.output / "scores.json", json.dumps(body, indent=1).encode())
    return body


def show(name: str, found: Comparison) -> None:
    print(
        f"\n{name}: {found.windows} windows of {found.instruments} instruments, {found.period[0]} to {found.period[1]}"
    )
    print(f"{'column':8}{'measure':9}{'against':13}{'model':>8}{'other':>8}{'skill':>8}   95 % interval")
    for score in found.scores:
        numbers = f"{score.model:8.3f}{score.other:8.3f}{score.skill:8.1%}   {score.low:6.1%} to {score.high:6.1%}"
        print(f"{score.column:8}{score.measure:9}{score.baseline:13}{numbers}  {score.verdict}")
    covered = ", ".join(f"{column} {share:.0%}" for column, share in found.coverage.items())
    print(f"between the 10 % and 90 % quantiles: {covered} (80 % would be right)")


if __name__ == "__main__":
    run(options_of())
