"""The range of every number that describes a text encoder: of a config.json before it is read, of an EncoderSpec after.

A config.json comes from elsewhere, and our C++ indexes memory by what it says. So every number of it is checked here, once
for all families: first as it stands in the file, so that reading cannot overflow or loop without end, then as the fields of
the spec that follow from it. What must agree with the weights (sizes, layers) is checked against their shapes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from anytorch.errors import ModelError

if TYPE_CHECKING:
    from anytorch.text.checkpoints.spec import EncoderSpec

LARGEST = 2**31 - 1  # our C++ counts in 32 bits
MOST_LAYERS = 2**12  # the deepest published models have a few hundred
MOST_POSITIONS = 2**21  # where the weights do not bound them: rotary angles are kept for each
LARGEST_THETA = 1e30
DAMAGED = "the file is damaged: fetch it again"
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")

# Every number of a config.json that a reader of `checkpoints.spec` asks for, by what it counts.
LAYERS = ("num_hidden_layers", "n_layers", "n_layer")
SIZES = (
    "vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings",
    "num_key_value_heads", "head_dim", "dim", "n_heads", "hidden_dim", "n_embd", "n_head", "n_inner", "n_positions",
    "max_trained_positions", "global_attn_every_n_layers", "local_attention",
)  # fmt: skip
COUNTS = (
    "pad_token_id", "type_vocab_size", "relative_attention_num_buckets", "sliding_window", "max_window_layers",
)  # fmt: skip
REALS = (
    "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps", "rope_theta", "global_rope_theta",
    "local_rope_theta", "rotary_emb_base",
)  # fmt: skip

# The fields of an EncoderSpec, as config.json calls most of them, with their least and greatest values.
FIELDS: dict[str, tuple[str, int, int]] = {
    "vocabulary": ("vocab_size", 1, LARGEST),
    "width": ("hidden_size", 1, LARGEST),
    "layers": ("num_hidden_layers", 1, MOST_LAYERS),
    "heads": ("num_attention_heads", 1, LARGEST),
    "kv_heads": ("num_key_value_heads", 1, LARGEST),
    "inner": ("intermediate_size", 1, LARGEST),
    "max_positions": ("max_position_embeddings", 1, LARGEST),
    "head_width": ("head_dim", 1, LARGEST),
    "position_offset": ("the first position", 0, LARGEST),
    "type_rows": ("type_vocab_size", 0, LARGEST),
    "relative_buckets": ("relative_attention_num_buckets", 0, LARGEST),
    "relative_distance": ("the furthest distance", 1, LARGEST),
    "pad_id": ("pad_token_id", 0, LARGEST),
}

FLAGS = (
    "gated", "pre_norm", "rms_norm", "embed_norm", "final_norm", "qk_norm", "learned_positions", "causal",
)  # fmt: skip


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError, which names `where` and the entry, for a number that no model can have. None is as if absent."""
    for name in LAYERS:
        _whole(config, name, 1, MOST_LAYERS, where)
    for name in SIZES:
        _whole(config, name, 1, LARGEST, where)
    for name in COUNTS:
        _whole(config, name, -1, LARGEST, where)  # -1 means "none" to some
    rotary = config.get("rope_parameters")
    inner = rotary.values() if isinstance(rotary, Mapping) else ()
    for table in (config, rotary, *inner):
        if isinstance(table, Mapping):
            for name in REALS:
                value = table.get(name)
                if value is not None and not _is_number(value):
                    raise ModelError(f"{where}: {name} is {_shown(value)}, not a number", hint=DAMAGED)


def refuse_absent(config: Mapping[str, Any], where: str) -> None:
    """Raise ModelError for a size that is there as null, which some readers cannot do without."""
    for name in (*LAYERS, *SIZES):
        if name in config and config[name] is None:
            raise ModelError(f"{where}: {name} is None, not a size", hint=DAMAGED)


def check_spec(spec: EncoderSpec, where: str) -> None:
    """Raise ModelError for a spec whose fields cannot be computed with: out of range, or at odds with one another."""
    for field, (name, least, most) in FIELDS.items():
        _refuse_beyond(getattr(spec, field), name, least, most, where)
    for field in FLAGS:
        if not isinstance(getattr(spec, field), bool):
            raise ModelError(f"{where}: {field} is {_shown(getattr(spec, field))}, not true or false", hint=DAMAGED)
    if spec.heads % spec.kv_heads:
        raise ModelError(f"{where}: {spec.heads} heads cannot share {spec.kv_heads} heads of keys and values")
    if spec.pad_id >= spec.vocabulary:
        raise ModelError(
            f"{where}: pad_token_id is {spec.pad_id}, which is not in the vocabulary of {spec.vocabulary}", hint=DAMAGED
        )
    if not spec.learned_positions:
        _refuse_beyond(spec.max_positions, "max_position_embeddings", 1, MOST_POSITIONS, where)
    products = {
        "hidden_size": spec.width,
        "intermediate_size": 2 * spec.inner,
        "num_attention_heads × head_dim": (spec.heads + 2 * spec.kv_heads) * spec.head_width,
        "max_position_embeddings": spec.max_positions + spec.position_offset,
    }
    for name, size in products.items():
        if size > LARGEST // 2:  # rows are padded, in 32 bits
            raise ModelError(f"{where}: {name} is too large: {size}", hint=DAMAGED)
    half = spec.relative_buckets // 4  # of each direction's buckets, those for one distance only
    if spec.relative_buckets and not 1 <= half < spec.relative_distance:
        raise ModelError(
            f"{where}: relative_attention_num_buckets is {spec.relative_buckets}, which does not divide distances up to "
            f"{spec.relative_distance}",
            hint=DAMAGED,
        )
    if not _is_number(spec.eps) or not 0 <= spec.eps <= 1:
        raise ModelError(f"{where}: the norms' eps is {_shown(spec.eps)}, not from 0 to 1", hint=DAMAGED)
    if spec.activation not in ACTIVATIONS:
        raise ModelError(f"{where}: activation {spec.activation!r} is not supported")
    _check_layers(spec.windows, spec.layers, "windows", where)
    _check_layers(spec.rotary_thetas, spec.layers, "rotary bases", where)
    for window in set(spec.windows):
        _refuse_beyond(window, "the window of a layer", 0, LARGEST, where)
    for theta in set(spec.rotary_thetas):
        if not _is_number(theta) or not 0 < theta <= LARGEST_THETA:
            raise ModelError(f"{where}: rope_theta is {_shown(theta)}, not a number above 0", hint=DAMAGED)
    if spec.rotary_thetas and spec.head_width % 2:
        raise ModelError(f"{where}: heads of {spec.head_width} features cannot be rotated in halves")


def check_depth(layers: int, names: Iterable[str], where: str) -> None:
    """Raise ModelError for more layers than there are tensors: what a config asks for is bounded by what there is."""
    there = len(list(names))
    if layers > there:
        raise ModelError(
            f"{where}: config.json asks for {layers} layers, and the checkpoint has {there} tensors",
            hint="config.json and the weights are of different models, or one of them is damaged",
        )


def _whole(config: Mapping[str, Any], name: str, least: int, most: int, where: str) -> None:
    if config.get(name) is not None:
        _refuse_beyond(config[name], name, least, most, where)


def _refuse_beyond(value: Any, name: str, least: int, most: int, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        what = "a size" if least == 1 else "a whole number"
        raise ModelError(f"{where}: {name} is {_shown(value)}, not {what} from {least} to {most}", hint=DAMAGED)


def _check_layers(values: tuple[Any, ...], layers: int, what: str, where: str) -> None:
    if values and len(values) != layers:
        raise ModelError(f"{where}: has {what} for {len(values)} layers, and {layers} layers", hint=DAMAGED)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _shown(value: Any) -> str:
    """A value for a message. Python refuses to write numbers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
