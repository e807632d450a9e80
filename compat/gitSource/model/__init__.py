"""Kronos's names: re-exports of anytorch's."""

from anytorch import Kronos as Kronos
from anytorch import KronosPredictor as KronosPredictor
from anytorch import KronosTokenizer as KronosTokenizer
from anytorch import resolve_device as resolve_device
from anytorch.forecast.published_calls import get_model_class as get_model_class
from anytorch.forecast.published_calls import model_dict as model_dict

__all__ = ["Kronos", "KronosPredictor", "KronosTokenizer", "get_model_class", "model_dict", "resolve_device"]
