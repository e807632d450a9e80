"""What a decoder is, read from a Hugging Face config.json: sizes, biases, norms, windows and rotary embedding.

Llama (2, 3), Mistral, Qwen2 (and 2.5) and Qwen3. The weights decide nothing here; `loading` compares their shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from anytorch.errors import ModelError
from anytorch.text.checkpoints.ranges import LARGEST, check_config
from anytorch.values import dataclass

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
QWEN: dict[str, Any] = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
# What a family's config.json means where it does not name a setting, as transformers has it.
ABSENT: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {**QWEN, "num_key_value_heads": 32},
    "qwen3": {**QWEN, "num_key_value_heads": 32, "head_dim": 128},
}
THETA = 10_000.0
ROTARY = ("default", "linear", "dynamic", "llama3", "yarn")
DAMAGED = "the file is damaged, or of another kind of model: fetch it again"


@dataclass(frozen=True)
class Rotary:
    """How positions turn queries and keys. `kind` is one of ROTARY; the rest as config.json calls it.

    "dynamic" is the plain one up to the model's own length; beyond it the angles would change with every token, which keys
    in a cache do not: longer contexts are refused.
    """

    kind: str = "default"
    theta: float = THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    scale: float = 1.0  # of cosines and sines
    truncate: bool = True


@dataclass(frozen=True)
class DecoderSpec:
    family: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    max_positions: int
    norm_eps: float
    rotary: Rotary
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False  # is the head the table of words?
    windows: tuple[int, ...] = ()  # by layer: how many positions it sees, 0 for all

    @property
    def q_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    def weight_numbers(self) -> int:
        """Numbers that one token reads: all weights, of the table of words one row."""
        attention = self.width * (2 * self.q_width + 2 * self.kv_width)
        return self.layers * (attention + 3 * self.width * self.inner) + self.vocabulary * self.width


def read_spec(config: Mapping[str, Any], where: str) -> DecoderSpec:
    """The spec of a config.json. Raises ModelError, which names `where`, for what is damaged or not known."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(
            f"{where}: model_type is {str(family)[:40]!r}, which has no decoder here",
            hint=f"known are {', '.join(FAMILIES)}; anytorch.TextGenerator takes whatever transformers knows",
        )
    check_config(config, where)
    config = {**ABSENT[family], **config}
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act is {str(config['hidden_act'])[:40]!r}; only silu is known")
    heads, width, layers = (
        _size(config, name, where) for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    kv_heads = config.get("num_key_value_heads") or heads
    head_width = config.get("head_dim") or width // heads
    if heads % kv_heads or head_width % 2 or head_width < 2:
        raise ModelError(
            f"{where}: {heads} heads of width {head_width} with {kv_heads} heads of keys cannot be computed",
            hint=DAMAGED,
        )
    bias = bool(config.get("attention_bias", False)) and family != "mistral"
    rotary = _rotary(config, where)
    return DecoderSpec(
        family=family,
        vocabulary=_size(config, "vocab_size", where),
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        inner=_size(config, "intermediate_size", where),
        max_positions=_positions(config, rotary, where),
        norm_eps=_number(config, "rms_norm_eps", 1e-6, where),
        rotary=rotary,
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, family, layers, where),
    )


def _size(config: Mapping[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if value is None:
        raise ModelError(f"{where}: {name} is missing", hint=DAMAGED)
    assert isinstance(value, int)  # `check_config`
    return value


def _number(table: Mapping[str, Any], name: str, otherwise: float, where: str) -> float:
    value = table.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{where}: {name} is {str(value)[:40]}, not a number above 0", hint=DAMAGED)
    return float(value)


def _windows(config: Mapping[str, Any], family: str, layers: int, where: str) -> tuple[int, ...]:
    window = config.get("sliding_window")
    if family == "llama" or (family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False)):
        window = None
    if window is None or window < 1:
        return (0,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if family == "mistral" else _size(config, "max_window_layers", where)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
        raise ModelError(f"{where}: layer_types is not {layers} of {', '.join(known)}", hint=DAMAGED)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _positions(config: Mapping[str, Any], rotary: Rotary, where: str) -> int:
    """How long texts may be: a first length that YaRN stretches is told beside max_position_embeddings, which often stays
    what it was before (Qwen's files)."""
    most = _size(config, "max_position_embeddings", where)
    if rotary.kind != "yarn" or _first_length(config, where) is None:
        return most
    return max(most, min(round(rotary.original_positions * rotary.factor), LARGEST))


def _first_length(config: Mapping[str, Any], where: str) -> Any:
    """original_max_position_embeddings, as it is told; None where it is not."""
    name = "original_max_position_embeddings"
    return config.get(name) or _table(config, where).get(name)


def _table(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, Mapping):
        raise ModelError(f"{where}: the table of the rotary embedding is a {type(table).__name__}", hint=DAMAGED)
    return table


def _rotary(config: Mapping[str, Any], where: str) -> Rotary:
    """From `rope_theta` and `rope_scaling`, as files before 2026 have them, or else from `rope_parameters`."""
    table = _table(config, where)
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in ROTARY or _number(table, "partial_rotary_factor", 1.0, where) != 1.0:
        raise ModelError(
            f"{where}: the rotary embedding {str(kind)[:40]!r} (or one of a part of each head) is not known",
            hint=f"known are {', '.join(ROTARY)}",
        )
    theta = _number(table, "rope_theta", _number(config, "rope_theta", THETA, where), where)
    factor = _number(table, "factor", 1.0, where)
    most = _size(config, "max_position_embeddings", where)
    original = _first_length(config, where) or most
    if type(original) is not int or not 0 < original < 2**31:
        raise ModelError(f"{where}: original_max_position_embeddings={str(original)[:40]} is invalid", hint=DAMAGED)
    if kind == "yarn" and table.get("factor") is None:
        factor = most / original
    return Rotary(
        kind,
        theta,
        factor,
        low_freq_factor=_number(table, "low_freq_factor", 1.0, where),
        high_freq_factor=_number(table, "high_freq_factor", 4.0, where),
        original_positions=original,
        beta_fast=_number(table, "beta_fast", 32.0, where),
        beta_slow=_number(table, "beta_slow", 1.0, where),
        scale=_scale(table, factor, where) if kind == "yarn" else 1.0,
        truncate=bool(table.get("truncate", True)),
    )


def _scale(table: Mapping[str, Any], factor: float, where: str) -> float:
    """YaRN's: given, or a logarithm of the factor."""
    if table.get("attention_factor") is not None:
        return _number(table, "attention_factor", 1.0, where)

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if table.get("mscale") and table.get("mscale_all_dim"):
        return grown(_number(table, "mscale", 1.0, where)) / grown(_number(table, "mscale_all_dim", 1.0, where))
    return grown(1.0)
