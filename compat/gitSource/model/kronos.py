"""`model.kronos` of the original: its classes and functions."""

from anytorch_compat.kronos import auto_regressive_inference as auto_regressive_inference
from anytorch_compat.kronos import calc_time_stamps as calc_time_stamps
from anytorch_compat.kronos import sample_from_logits as sample_from_logits
from anytorch_compat.kronos import top_k_top_p_filtering as top_k_top_p_filtering

from anytorch import Kronos as Kronos
from anytorch import KronosPredictor as KronosPredictor
from anytorch import KronosTokenizer as KronosTokenizer

__all__ = [
    "Kronos",
    "KronosPredictor",
    "KronosTokenizer",
    "auto_regressive_inference",
    "calc_time_stamps",
    "sample_from_logits",
    "top_k_top_p_filtering",
]
