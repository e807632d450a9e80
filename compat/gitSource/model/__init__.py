"""Kronos's names."""

from anytorch_compat.kronos import get_model_class as get_model_class
from anytorch_compat.kronos import model_dict as model_dict
from anytorch_compat.system import resolve_device as resolve_device

from anytorch import Kronos as Kronos
from anytorch import KronosPredictor as KronosPredictor
from anytorch import KronosTokenizer as KronosTokenizer

__all__ = ["Kronos", "KronosPredictor", "KronosTokenizer", "get_model_class", "model_dict", "resolve_device"]
