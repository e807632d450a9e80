"""Kronos's names: re-exports of anytorch's."""

from typing import Any

from anytorch import Kronos as Kronos
from anytorch import KronosPredictor as KronosPredictor
from anytorch import KronosTokenizer as KronosTokenizer
from anytorch import resolve_device as resolve_device

__all__ = ["Kronos", "KronosPredictor", "KronosTokenizer", "get_model_class", "model_dict", "resolve_device"]

model_dict: dict[str, Any] = {
    "kronos_tokenizer": KronosTokenizer,
    "kronos": Kronos,
    "kronos_predictor": KronosPredictor,
}


def get_model_class(model_name: str) -> Any:
    """The class of that name. As in the original, another name is a NotImplementedError; this one says which there are."""
    if model_name not in model_dict:
        raise NotImplementedError(f"no model is called {model_name!r}; there are {', '.join(model_dict)}")
    return model_dict[model_name]
