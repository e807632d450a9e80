"""Training on one CPU, one GPU, or the many processes of torchrun. Importing this package imports torch."""

from __future__ import annotations

from anytorch.train.kronos import finetune_predictor, finetune_tokenizer
from anytorch.train.loop import Outcome
from anytorch.train.plan import Plan

__all__ = ["Outcome", "Plan", "finetune_predictor", "finetune_tokenizer"]
