"""The checkpoints that are known by name: configurations and context lengths, which config.json does not say.

"tiny" comes with anytorch: half a million weights, trained on synthetic candles only. It makes `anytorch forecast --sample`
work at once and offline, and is a start for experiments. It has never seen a real price. `examples/train_tiny.py` makes it
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _model(
    layers: int, width: int, heads: int, inner: int, dropouts: tuple[float, float, float, float]
) -> dict[str, Any]:
    ffn, attn, resid, token = dropouts
    return {
        "s1_bits": 10,
        "s2_bits": 10,
        "n_layers": layers,
        "d_model": width,
        "n_heads": heads,
        "ff_dim": inner,
        "ffn_dropout_p": ffn,
        "attn_dropout_p": attn,
        "resid_dropout_p": resid,
        "token_dropout_p": token,
        "learn_te": True,
    }


def _tokenizer(group_size: int) -> dict[str, Any]:
    return {
        "d_in": 6,
        "d_model": 256,
        "n_heads": 4,
        "ff_dim": 512,
        "n_enc_layers": 4,
        "n_dec_layers": 4,
        "ffn_dropout_p": 0.0,
        "attn_dropout_p": 0.0,
        "resid_dropout_p": 0.0,
        "s1_bits": 10,
        "s2_bits": 10,
        "beta": 0.05,
        "gamma0": 1.0,
        "gamma": 1.1,
        "zeta": 0.05,
        "group_size": group_size,
    }


@dataclass(frozen=True)
class Checkpoint:
    """A published model with the tokenizer it was trained with."""

    name: str
    model: str  # Hugging Face repository
    tokenizer: str
    max_context: int
    config: dict[str, Any]
    tokenizer_config: dict[str, Any]


def _checkpoint(size: str, tokenizer: str, max_context: int, config: dict[str, Any], group_size: int) -> Checkpoint:
    names = (f"kronos-{size}", f"NeoQuasar/Kronos-{size}", f"NeoQuasar/Kronos-Tokenizer-{tokenizer}")
    return Checkpoint(*names, max_context, config, _tokenizer(group_size))


PUBLISHED = {
    found.name: found
    for found in (
        _checkpoint("mini", "2k", 2048, _model(4, 256, 4, 512, (0.2, 0.0, 0.2, 0.0)), 5),
        _checkpoint("small", "base", 512, _model(8, 512, 8, 1024, (0.25, 0.1, 0.25, 0.1)), 4),
        _checkpoint("base", "base", 512, _model(12, 832, 16, 2048, (0.2, 0.0, 0.2, 0.0)), 4),
    )
}

TINY = "tiny"  # the name to ask for it by
MAX_CONTEXT = 128  # rows: the windows it was trained on
UNSAID_CONTEXT = 512  # of a model whose folder does not say: config.json has no such key

# Short names for repositories.
HUB = {
    **{name: checkpoint.model for name, checkpoint in PUBLISHED.items()},
    "kronos-tokenizer-base": "NeoQuasar/Kronos-Tokenizer-base",
    "kronos-tokenizer-2k": "NeoQuasar/Kronos-Tokenizer-2k",
}
