"""Kronos, a published model that forecasts candles (open, high, low, close, volume, amount), and its tokenizer."""

from __future__ import annotations

from anytorch.forecast.model.model import STAMPS, Kronos
from anytorch.forecast.model.pretrained import PUBLISHED, Checkpoint
from anytorch.forecast.model.tokenizer import KronosTokenizer

__all__ = ["PUBLISHED", "STAMPS", "Checkpoint", "Kronos", "KronosTokenizer"]
