"""Forecasting candles with Kronos: an exact cache, shared prompts, any device.

The way data flows: `arguments` checks what is asked, `inputs` tables (`given_times` their times, `scaling` their size) →
`tokens` makes ids of them → `generate` runs the steps over a `decoder` (the model made ready) with a `cache`, drawing by
`sampling` → `tokens` decodes → `results`. `published_calls` are the original's functions on the same engine.
"""

from __future__ import annotations

from anytorch.engines.forecast.predictor import KronosPredictor
from anytorch.engines.forecast.results import Forecast

__all__ = ["Forecast", "KronosPredictor"]
