"""Kronos, a published model that forecasts candles (open, high, low, close, volume, amount), and its tokenizer."""

from __future__ import annotations

from anytorch.models.kronos.model import STAMPS, Kronos
from anytorch.models.kronos.published import PUBLISHED, Checkpoint
from anytorch.models.kronos.tokenizer import KronosTokenizer

__all__ = ["PUBLISHED", "STAMPS", "Checkpoint", "Kronos", "KronosTokenizer"]
