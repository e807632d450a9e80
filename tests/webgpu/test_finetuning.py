"""Fine-tuning on the webgpu device: the losses of the CPU, from recorded steps where random numbers allow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

SMALL = {
    "s1_bits": 4,
    "s2_bits": 4,
    "d_model": 16,
    "n_heads": 2,
    "ff_dim": 24,
    "attn_dropout_p": 0.0,
    "resid_dropout_p": 0.0,
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_steps_on_webgpu_are_those_of_the_cpu(dropout: float, torch: Any) -> None:
    """A recording there repeats its random numbers: with dropout it must be found out and not used."""
    from anytorch.forecast.candles.generate import sample_market
    from anytorch.forecast.model import PUBLISHED, Kronos, KronosTokenizer
    from anytorch.forecast.training.finetune import PREDICTOR_PLAN, PredictorObjective
    from anytorch.forecast.training.loop import Run
    from anytorch.forecast.training.store import RunFolder
    from anytorch.forecast.training.windows import as_series, split_windows
    from anytorch.train import World

    splits = split_windows(as_series(sample_market(1, 300, seed=4)), lookback=12, horizon=4)
    plan = replace(PREDICTOR_PLAN, lookback=12, horizon=4, batch_size=4, mixed_precision=False, learning_rate=1e-3)
    tokens = {**PUBLISHED["kronos-small"].tokenizer_config, **SMALL, "n_enc_layers": 2, "n_dec_layers": 2}
    losses = {}
    for where in ("cpu", "webgpu"):
        device = torch.device(where, 0) if where == "webgpu" else torch.device(where)
        torch.manual_seed(1)
        shape = {**SMALL, "n_layers": 1, "learn_te": True, "token_dropout_p": 0.0, "ffn_dropout_p": dropout}
        model, tokenizer = Kronos(**shape).to(device), KronosTokenizer(**tokens).to(device)
        run = Run(PredictorObjective(model, tokenizer), splits, plan, World(device), RunFolder("unused"), {})
        losses[where] = [float(run.take_step()[0]) for _ in range(4)]
    assert run.recorded is not None and ("WrongAnswer" in run.recorded.failed) == bool(dropout)
    if not dropout:
        assert losses["webgpu"] == pytest.approx(losses["cpu"], rel=1e-4)
