"""`KronosPredictor` with its `device` and `device_warning`."""

from anytorch.forecast.predictor import KronosPredictor

__all__ = ["KronosPredictor"]
