"""A configuration of a few thousand weights, and data to go with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anytorch.forecast.candles.generate import sample_market

TOKENIZER: dict[str, Any] = {
    "d_in": 6,
    "d_model": 16,
    "n_heads": 2,
    "ff_dim": 24,
    "n_enc_layers": 2,
    "n_dec_layers": 2,
    "ffn_dropout_p": 0.0,
    "attn_dropout_p": 0.0,
    "resid_dropout_p": 0.0,
    "s1_bits": 4,
    "s2_bits": 4,
    "beta": 0.05,
    "gamma0": 1.0,
    "gamma": 1.1,
    "zeta": 0.05,
    "group_size": 4,
}
MODEL: dict[str, Any] = {
    "s1_bits": 4,
    "s2_bits": 4,
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 2,
    "ff_dim": 24,
    "learn_te": True,
    "ffn_dropout_p": 0.0,
    "attn_dropout_p": 0.0,
    "resid_dropout_p": 0.0,
    "token_dropout_p": 0.0,
}
SHAPE: dict[str, Any] = {
    "lookback": 12,
    "horizon": 4,
    "batch_size": 8,
    "epochs": 1,
    "steps_per_epoch": 8,
    "validation_windows": 24,
    "learning_rate": 3e-3,
    "log_every": 2,
    "save_every": 3,
    "device": "cpu",
    "mixed_precision": False,
}


@pytest.fixture
def tokenizer_config() -> dict[str, Any]:
    return dict(TOKENIZER)


@pytest.fixture
def model_config() -> dict[str, Any]:
    return dict(MODEL)


@pytest.fixture
def shape() -> dict[str, Any]:
    return dict(SHAPE)


@pytest.fixture(scope="session")
def market() -> dict[str, Any]:
    return sample_market(2, 400, seed=4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums of floating-point numbers depend on how threads share them; and threads that wait cost more than they help."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
