"""The shape of a text encoder as plain data, read from its config.json by one pure function.

Whoever computes (the packed CPU encoder, the torch modules) asks these fields and never the family's name: a family is a
set of values for them. Weights come under the names of `anytorch.text.checkpoints.weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from anytorch.errors import ModelError
from anytorch.text.checkpoints.ranges import DAMAGED, check_config, check_spec, refuse_absent
from anytorch.values import dataclass


@dataclass(frozen=True)
class EncoderSpec:
    """The shape of one encoder. All layers have the same sizes.

    One layer, with x of `width` features, where `norm` is LayerNorm or RMSNorm with `eps`:

        post-norm (`pre_norm` False):  x = attn_norm(x + attention(x));   x = mlp_norm(x + mlp(x))
        pre-norm  (`pre_norm` True):   x = x + attention(attn_norm(x));   x = x + mlp(mlp_norm(x))

    mlp(x) is `down(activation(up(x)))`, or `down(activation(gate(x)) * up(x))` when `gated`. Scores are scaled by
    head_width ** -0.5. A norm without weights in the checkpoint is the identity (ModernBERT's first `attn_norm`).
    """

    family: str  # "bert", "roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "qwen3"
    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int  # features between up and down
    max_positions: int  # the longest text, in tokens, that the positions allow
    kv_heads: int = 0  # heads of k and v; fewer than `heads` means grouped queries
    head_width: int = 0
    activation: str = "gelu"  # "gelu" (by erf), "gelu_tanh", "relu", "silu"
    gated: bool = False
    pre_norm: bool = False
    rms_norm: bool = False  # RMSNorm instead of LayerNorm, for every norm
    eps: float = 1e-12
    embed_norm: bool = True  # a norm after the embeddings
    final_norm: bool = False  # a norm after the last layer
    qk_norm: bool = False  # RMSNorm of each head's q and k before the rotation
    learned_positions: bool = True
    position_offset: int = 0  # row of the first token in the position table: RoBERTa's begin after the padding id
    type_rows: int = 0  # rows of the token-type table; row 0 is added to every token. 0: no such table
    relative_buckets: int = 0  # MPNet: a bias per head and distance bucket, shared by all layers. 0: none
    relative_distance: int = 128  # beyond this distance all are in the last bucket
    rotary_thetas: tuple[float, ...] = ()  # per layer; empty: no rotation. Halves are rotated (not interleaved pairs)
    windows: tuple[int, ...] = ()  # per layer: the greatest |i - j| that attends; 0 for all. Empty: 0 everywhere
    causal: bool = False
    pad_id: int = 0

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def linear_weights(self) -> int:
        """Weights of all matrix products: as many multiply-adds per token."""
        attention = self.width * self.head_width * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + self.width * self.inner * (3 if self.gated else 2))

    def work(self, tokens: int, pairs: int) -> float:
        """Multiply-adds for so many tokens, of which so many pairs attend: the sum of the squared lengths."""
        return float(tokens * self.linear_weights + pairs * self.layers * 2 * self.heads * self.head_width)


def read_spec(config: Mapping[str, Any], *, where: str = "config.json") -> EncoderSpec:
    """The encoder that a Hugging Face config.json describes. Raises ModelError naming `where` for any other model."""
    if not isinstance(config, Mapping):
        raise ModelError(f"{where}: not a model configuration", hint="the file is damaged")
    named = config.get("model_type")
    reader = READERS.get(str(named))
    if reader is None:
        known = ", ".join(sorted(READERS))
        raise ModelError(
            f"{where}: model_type {named!r} is not a supported text encoder; supported: {known}",
            hint="name another model; cross-encoders, image and audio models do not make text vectors",
        )
    check_config(config, where)
    try:
        spec = reader(config)
    except KeyError as exc:
        raise ModelError(
            f"{where}: {exc.args[0]!r} is missing, which a {named} model needs",
            hint="the file is damaged or of another kind of model: fetch it again",
        ) from exc
    except (TypeError, ValueError, AttributeError, ArithmeticError) as exc:
        refuse_absent(config, where)
        raise ModelError(f"{where}: invalid for a {named} model: {exc}", hint=DAMAGED) from exc
    check_spec(spec, where)
    return spec


def _activation(name: Any) -> str:
    known = {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "swiglu": "silu",
    }
    if name not in known:
        raise ModelError(f"config.json: activation {name!r} is not supported; supported: {', '.join(known)}")
    return known[name]


def _theta(config: Mapping[str, Any], default: float, kind: str = "", old_name: str = "rope_theta") -> float:
    """The base of the rotation, from the new field (`rope_parameters`) or the old ones; refuses what rescales it."""
    parameters = config.get("rope_parameters") or {}
    if kind and kind in parameters:
        parameters = parameters[kind] or {}
    for scaling in (parameters, config.get("rope_scaling") or {}):
        named = scaling.get("rope_type", scaling.get("type", "default"))
        if named != "default":
            raise ModelError(f"config.json: rotary positions of type {named!r} are not supported, only the default")
    return float(parameters.get("rope_theta", config.get(old_name, default)))


def _spec(family: str, config: Mapping[str, Any], **fields: Any) -> EncoderSpec:
    """A spec of what most families call by these names; `fields` is what this one has besides, or otherwise."""
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    usual = {
        "vocabulary": config["vocab_size"],
        "width": width,
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "kv_heads": heads,
        "head_width": config.get("head_dim") or (width // heads if heads else 0),
        "inner": config["intermediate_size"],
        "max_positions": config["max_position_embeddings"],
        "pad_id": max(config.get("pad_token_id") or 0, 0),  # -1 means "none" to some
        "activation": _activation(config.get("hidden_act", "silu" if fields.get("gated") else "gelu")),
        "eps": config.get("layer_norm_eps", 1e-12),
    }
    return EncoderSpec(family=family, **{**usual, **fields})


def _bert(config: Mapping[str, Any]) -> EncoderSpec:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ModelError(f"config.json: position_embedding_type {config['position_embedding_type']!r} is not supported")
    return _spec("bert", config, type_rows=config.get("type_vocab_size", 2) or 0)


def _roberta(config: Mapping[str, Any]) -> EncoderSpec:
    # Positions begin after the padding id, so that the table has that many rows more than there are positions.
    pad = config.get("pad_token_id", 1)
    return _spec(
        "roberta",
        config,
        pad_id=pad,
        position_offset=pad + 1,
        max_positions=config["max_position_embeddings"] - pad - 1,
        type_rows=config.get("type_vocab_size", 2) or 0,
    )


def _distilbert(config: Mapping[str, Any]) -> EncoderSpec:
    renamed = {
        "hidden_size": config["dim"],
        "num_attention_heads": config["n_heads"],
        "num_hidden_layers": config["n_layers"],
        "intermediate_size": config["hidden_dim"],
        "hidden_act": config.get("activation", "gelu"),
    }
    return _spec("distilbert", {**config, **renamed}, eps=1e-12)


def _mpnet(config: Mapping[str, Any]) -> EncoderSpec:
    return _spec(
        "mpnet",
        config,
        pad_id=1 if config.get("pad_token_id") is None else config["pad_token_id"],
        # The model's own code fixes the padding position at 1, whatever pad_token_id says.
        position_offset=2,
        max_positions=config["max_position_embeddings"] - 2,
        relative_buckets=config.get("relative_attention_num_buckets", 32),
    )


def _modernbert(config: Mapping[str, Any]) -> EncoderSpec:
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(config["num_hidden_layers"])
    ]
    distance = config.get("local_attention", 128) // 2
    everywhere = _theta(config, 160_000.0, "full_attention", "global_rope_theta")
    nearby = _theta(config, 10_000.0, "sliding_attention", "local_rope_theta")
    return _spec(
        "modernbert",
        {**config, "hidden_act": config.get("hidden_activation", "gelu")},
        gated=True,
        pre_norm=True,
        final_norm=True,
        eps=config.get("norm_eps", 1e-5),
        learned_positions=False,
        rotary_thetas=tuple(nearby if kind == "sliding_attention" else everywhere for kind in kinds),
        windows=tuple(distance if kind == "sliding_attention" else 0 for kind in kinds),
    )


def _nomic_bert(config: Mapping[str, Any]) -> EncoderSpec:
    if "n_embd" in config:  # the names of the model's first publication
        if config.get("prenorm") or config.get("rotary_emb_interleaved") or config.get("rotary_emb_fraction", 1.0) != 1:
            raise ModelError("config.json: this NomicBERT variant (pre-norm or partly rotated) is not supported")
        config = {
            **config,
            "hidden_size": config["n_embd"],
            "num_attention_heads": config["n_head"],
            "num_hidden_layers": config["n_layer"],
            "intermediate_size": config["n_inner"] or 4 * config["n_embd"],
            # Beyond the length it was trained on the published code rescales the rotation; we stop there.
            "max_position_embeddings": config.get("max_trained_positions") or config["n_positions"],
            "hidden_act": config.get("activation_function", "swiglu"),
            "layer_norm_eps": config.get("layer_norm_epsilon", 1e-12),
            "rope_theta": config.get("rotary_emb_base", 1000.0),
        }
    return _spec(
        "nomic_bert",
        config,
        gated=True,
        learned_positions=False,
        type_rows=config.get("type_vocab_size", 2) or 0,
        rotary_thetas=(_theta(config, 1000.0),) * config["num_hidden_layers"],
    )


def _qwen3(config: Mapping[str, Any]) -> EncoderSpec:
    sliding = config.get("sliding_window") if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    # A causal window of n tokens reaches n - 1 back.
    layers = range(config["num_hidden_layers"])
    windows = tuple(sliding - 1 if sliding and layer >= first else 0 for layer in layers)
    return _spec(
        "qwen3",
        config,
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_width=config.get("head_dim") or 128,
        gated=True,
        pre_norm=True,
        rms_norm=True,
        eps=config.get("rms_norm_eps", 1e-6),
        embed_norm=False,
        final_norm=True,
        qk_norm=True,
        learned_positions=False,
        rotary_thetas=(_theta(config, 10_000.0),) * len(layers),
        windows=windows if any(windows) else (),
        causal=True,
    )


READERS: dict[str, Callable[[Mapping[str, Any]], EncoderSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "camembert": _roberta,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "modernbert": _modernbert,
    "nomic_bert": _nomic_bert,
    "qwen3": _qwen3,
}
