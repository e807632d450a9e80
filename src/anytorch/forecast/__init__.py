"""Forecasting candles with Kronos: `KronosPredictor`. Importing this package imports no torch and no pandas.

The way data flows: `checkpoints` finds a model and its tokenizer; `inputs` checks what is asked and makes one scaled series
of a table; `decoding.decoder` (model and tokenizer made ready) makes ids of it; `generation` runs the steps
with its `Cache`, drawing by `decoding.sampling`, in `kernels` where they measured faster; `results` makes the answer.

candles      tables of prices: made up, read, checked, mended, drawn
model        Kronos and its tokenizer as published, and the tiny pair that comes with anytorch
decoding     one step in plain torch: model and tokenizer made ready, the cache, the draws
kernels      our Triton kernels beside their launchers, and the choice between them and torch's
generation   the loop over steps: growing windows, full windows, recorded steps
training     fine-tuning on one process or under torchrun
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    from anytorch.forecast.predictor import KronosPredictor as KronosPredictor
    from anytorch.forecast.results import Forecast as Forecast

__getattr__, __dir__, __all__ = lazy_names(__name__, {"predictor": "KronosPredictor", "results": "Forecast"})
