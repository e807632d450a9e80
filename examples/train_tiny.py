"""Train the tiny checkpoint that comes with anytorch, on generated candles: about ten minutes of one CPU core.

OMP_NUM_THREADS=1 python examples/train_tiny.py --output /tmp/tiny
for part in tokenizer model; do
  cp /tmp/tiny/$part/best_model/{config.json,model.safetensors} src/anytorch/forecast/model/tiny/$part/
done

Killed in the middle, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from anytorch.forecast.candles.generate import sample_market
from anytorch.forecast.training import finetune_predictor, finetune_tokenizer

BITS = {"s1_bits": 8, "s2_bits": 8}
NO_DROPOUT = {
    "ffn_dropout_p": 0.0,
    "attn_dropout_p": 0.0,
    "resid_dropout_p": 0.0,
}  # every window is new: no overfitting
TOKENIZER = {
    "d_in": 6,
    "d_model": 64,
    "n_heads": 4,
    "ff_dim": 128,
    "n_enc_layers": 3,
    "n_dec_layers": 3,
    "beta": 0.05,
    "gamma0": 1.0,
    "gamma": 1.1,
    "zeta": 0.05,
    "group_size": 8,
    **BITS,
    **NO_DROPOUT,
}
MODEL = {
    "n_layers": 3,
    "d_model": 96,
    "n_heads": 4,
    "ff_dim": 256,
    "token_dropout_p": 0.0,
    "learn_te": True,
    **BITS,
    **NO_DROPOUT,
}
SEED = 2024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokenizer-steps", type=int, default=300)
    parser.add_argument("--model-steps", type=int, default=1000)
    options = parser.parse_args()
    data = {
        **{f"5min/{name}": frame for name, frame in sample_market(20, 6000, seed=SEED).items()},
        **{f"1h/{k}": v for k, v in sample_market(4, 3000, seed=SEED + 1, freq="1h", session="always").items()},
        **{f"1D/{name}": frame for name, frame in sample_market(6, 2000, seed=SEED + 2, freq="1D").items()},
    }
    shape = {"lookback": 96, "horizon": 32, "batch_size": 32, "epochs": 1, "validation": 0.05, "test": 0.0}
    shape |= {"evaluate_every": 75, "validation_windows": 192, "save_every": 50, "device": "cpu", "progress": show}
    shape["mixed_precision"] = False  # the same weights on every CPU, whatever it is fast at
    first = finetune_tokenizer(
        data,
        output=options.output / "tokenizer",
        tokenizer=TOKENIZER,
        learning_rate=3e-3,
        steps_per_epoch=options.tokenizer_steps,
        **shape,
    )
    print(f"\ntokenizer: {first}")
    second = finetune_predictor(
        data,
        output=options.output / "model",
        model=MODEL,
        tokenizer=first.folder,
        learning_rate=3e-3,
        steps_per_epoch=options.model_steps,
        **shape,
    )
    print(f"\nmodel: {second}")


def show(done: int, total: int, what: str) -> None:
    if done % 25 == 0:
        print(f"{done}/{total} {what}", flush=True)


if __name__ == "__main__":
    main()
