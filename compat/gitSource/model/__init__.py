"""Kronos's names: re-exports of anytorch's."""

from anytorch import Kronos as Kronos
from anytorch import KronosPredictor as KronosPredictor
from anytorch import KronosTokenizer as KronosTokenizer
from anytorch import resolve_device as resolve_device

__all__ = ["Kronos", "KronosPredictor", "KronosTokenizer", "resolve_device"]
