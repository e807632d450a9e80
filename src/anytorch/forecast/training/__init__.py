"""Training on one CPU, one GPU, or the many processes of torchrun. Importing this package imports torch."""

from __future__ import annotations

from anytorch.forecast.training.finetune import finetune_predictor, finetune_tokenizer
from anytorch.forecast.training.loop import Outcome
from anytorch.forecast.training.plan import TrainingPlan

__all__ = ["Outcome", "TrainingPlan", "finetune_predictor", "finetune_tokenizer"]
