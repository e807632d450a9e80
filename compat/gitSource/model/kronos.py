"""`model.kronos` of the original: its three classes."""

from anytorch import Kronos as Kronos
from anytorch import KronosPredictor as KronosPredictor
from anytorch import KronosTokenizer as KronosTokenizer

__all__ = ["Kronos", "KronosPredictor", "KronosTokenizer"]
