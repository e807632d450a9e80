"""Forecasting candles with Kronos: an exact cache, shared prompts, any device.

The way data flows: `inputs` checks tables and timestamps → `tokens` makes ids of them → `generate` runs the steps over a
`decoder` (the model made ready) with a `cache`, drawing by `sampling` → `tokens` decodes → `results`.
"""

from __future__ import annotations

from anytorch.engines.forecast.predictor import KronosPredictor
from anytorch.engines.forecast.results import Forecast

__all__ = ["Forecast", "KronosPredictor"]
