"""Whatever number a config.json or a spec holds: an encoder that computes within its memory, or our own error."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch import native
from anytorch.errors import AnytorchError, ModelError
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.ranges import MOST_LAYERS, check_spec
from anytorch.text.checkpoints.spec import EncoderSpec, read_spec
from anytorch.text.checkpoints.weights import EncoderWeights, shapes
from anytorch.text.packed import PackedEncoder, binding

NASTY: tuple[Any, ...] = (
    -1, -10, -2_000_000, -(2**31), -(2**31) - 1, 0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 1, 2**63, 10**400, 0.5, -1.5,
    1e400, -math.inf, math.nan, True, "7", "", [], [1], {}, {"rope_theta": -1.0}, None,
)  # fmt: skip
SIZES = {
    "vocab_size": 30, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 12,
    "max_position_embeddings": 16, "pad_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, "layer_norm_eps": 1e-12, "type_vocab_size": 2},
    "roberta": {**SIZES, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
    "distilbert": {
        "vocab_size": 30, "max_position_embeddings": 16, "dim": 8, "n_heads": 2, "n_layers": 2, "hidden_dim": 12,
        "pad_token_id": 0,
    },
    "mpnet": {**SIZES, "relative_attention_num_buckets": 8, "layer_norm_eps": 1e-5},
    "modernbert": {
        **SIZES, "global_attn_every_n_layers": 2, "local_attention": 4, "global_rope_theta": 1e4,
        "local_rope_theta": 1e3, "norm_eps": 1e-5, "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
    },
    "nomic_bert": {
        "vocab_size": 30, "n_embd": 8, "n_head": 2, "n_layer": 2, "n_inner": 12, "n_positions": 16,
        "max_trained_positions": 16, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "type_vocab_size": 2,
        "rotary_emb_fraction": 1.0,
    },
    "qwen3": {
        **SIZES, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4,
        "use_sliding_window": True, "max_window_layers": 1,
    },
}  # fmt: skip
SMALL = 100_000  # weights of an encoder that a test may build
IDS, STARTS = np.arange(8, dtype=np.int32), np.array([0, 3, 8], np.int32)


@pytest.fixture(autouse=True)
def shared_builds(isolation: None, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.config.cache.mkdir("anytorch-native")
    (tmp_path / "anytorch-cache").mkdir(exist_ok=True)
    (tmp_path / "anytorch-cache" / "native").symlink_to(folder, target_is_directory=True)


def weights_of(spec: EncoderSpec) -> dict[str, np.ndarray] | None:
    """Random weights of a spec; None where they would be many."""
    wanted = shapes(spec)
    if sum(math.prod(shape) for shape in wanted.values()) > SMALL:
        return None
    rng = np.random.default_rng(1)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in wanted.items()}


def changes(family: str) -> Iterator[dict[str, Any]]:
    config = {"model_type": family, **CONFIGS[family]}
    for name in CONFIGS[family]:
        for value in NASTY:
            yield {**config, name: value}


@pytest.mark.parametrize("family", CONFIGS)
def test_any_number_of_a_config_gives_an_encoder_or_our_error(family: str) -> None:
    """The class of a negative pad_token_id, by which the position table was read before its beginning."""
    assert read_spec({"model_type": family, **CONFIGS[family]}).family == family
    refused, ran = 0, set()
    for config in changes(family):
        try:
            spec = read_spec(config, where="config.json")
        except ModelError as exc:
            assert "config.json" in exc.message
            refused += 1
            continue
        assert spec.position_offset >= 0 and 0 <= spec.pad_id < spec.vocabulary and spec.layers <= MOST_LAYERS
        if spec in ran or (weights := weights_of(spec)) is None:
            continue
        ran.add(spec)
        with PackedEncoder(spec, weights, threads=1) as encoder:
            length = min(len(IDS), spec.max_positions)
            vectors = encoder.run(IDS[:length] % spec.vocabulary, [0, length])
        assert vectors.shape == (1, spec.width)
    assert refused > 3 * len(CONFIGS[family]) and ran


@pytest.mark.parametrize("family", CONFIGS)
def test_any_number_of_a_spec_is_checked_at_the_native_boundary(family: str) -> None:
    """A spec that somebody made otherwise: C++ must not get a number cut off to 32 bits, nor one it cannot index by."""
    spec = read_spec({"model_type": family, **CONFIGS[family]})
    weights = weights_of(spec)
    assert weights is not None
    for field in fields(EncoderSpec):
        for value in NASTY:
            if field.name == "family" or not isinstance(value, (int, float)) or isinstance(value, bool):
                continue
            try:
                changed = replace(
                    spec, **{field.name: (value,) * 2 if field.name in ("windows", "rotary_thetas") else value}
                )
                with PackedEncoder(changed, weights, threads=1) as encoder:
                    encoder.run(IDS, STARTS)
            except AnytorchError:
                continue


def test_cpp_refuses_shapes_that_python_let_pass() -> None:
    spec = read_spec({"model_type": "roberta", **CONFIGS["roberta"]})
    library = binding.open_library()
    good = binding.shape_of(spec, 512, 96)
    assert library.encoder_shape_is_valid(ctypes.byref(good))
    signs = ("activation", "gated", "pre_norm", "rms_norm", "embed_norm", "final_norm", "qk_norm", "causal")
    for name in (*binding.WHOLE, "budget", "block"):
        for value in (-1, -(2**31), 2**31 - 1):
            shape = binding.shape_of(spec, 512, 96)
            setattr(shape, name, value)
            if name in signs[1:] or (value > 0 and name in ("vocabulary", "layers", "budget", "block")):
                continue  # a flag; or large, and bounded by the tensors that come next
            assert not library.encoder_shape_is_valid(ctypes.byref(shape)), (name, value)
            assert not library.encoder_new(ctypes.byref(shape), 1), (name, value)
    with pytest.raises(ModelError, match="budget"):
        binding.shape_of(spec, 2**32 + 512, 96)


def test_cpp_refuses_products_that_do_not_fit_the_shape() -> None:
    """Its memory is as wide as the shape says: a product with other rows or columns would be computed beyond it."""
    spec = read_spec({"model_type": "bert", **CONFIGS["bert"]})
    library = binding.open_library()
    shape = binding.shape_of(spec, 512, 96)
    handle = library.encoder_new(ctypes.byref(shape), 1)
    try:
        sides = spec.heads * spec.head_width
        right = {
            binding.QKV: (3 * sides, spec.width),
            binding.OUT: (spec.width, sides),
            binding.UP: (spec.inner, spec.width),
            binding.DOWN: (spec.width, spec.inner),
        }
        for which, (outputs, inputs) in right.items():
            for wrong in ((1, 0), (-1, 0), (0, 1), (0, -1), (2**20, 0)):
                sizes = (outputs + wrong[0], inputs + wrong[1])
                assert library.encoder_linear_new(handle, 0, which, *sizes, 0, 0, 0) == binding.BAD_PART
            for gated, format_, eight in ((1, 0, 0), (0, 5, 0), (0, -1, 0), (0, binding.FORMATS["int4"], 1)):
                answer = library.encoder_linear_new(handle, 0, which, outputs, inputs, gated, format_, eight)
                assert answer == binding.BAD_PART
            assert library.encoder_linear_new(handle, 0, which, outputs, inputs, 0, 1, 1) == binding.OK
    finally:
        library.encoder_free(handle)


def test_ctypes_cuts_nothing_off() -> None:
    library = binding.open_library()
    assert library.encoder_peak(0, 1) > 0
    for number in (2**32 + 1, -(2**31) - 1, 10**30):
        with pytest.raises(ctypes.ArgumentError, match="32 bits"):
            library.encoder_peak(0, number)
    assert native.Int32.from_param(True).value == 1


def test_layers_are_bounded_by_the_tensors_that_are_there(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"embeddings.word_embeddings.weight": np.zeros((30, 8), np.float32)}, tmp_path / "model.safetensors")
    deep = read_spec({"model_type": "bert", **CONFIGS["bert"], "num_hidden_layers": MOST_LAYERS})
    with pytest.raises(ModelError, match=f"asks for {MOST_LAYERS} layers, and the checkpoint has 1 tensors"):
        EncoderWeights(Checkpoint(tmp_path), deep)
    for family, config in CONFIGS.items():
        for name in ("num_hidden_layers", "n_layers", "n_layer"):
            if name in config:
                with pytest.raises(ModelError, match=name):
                    read_spec({"model_type": family, **config, name: 10**9})


def test_a_number_of_thousands_of_digits_can_be_told() -> None:
    with pytest.raises(ModelError, match=r"hidden_size is a number of \d+ bits"):
        read_spec({"model_type": "bert", **CONFIGS["bert"], "hidden_size": 1 << 20_000})
    spec = read_spec({"model_type": "bert", **CONFIGS["bert"]})
    with pytest.raises(ModelError, match="not a size from 1"):
        check_spec(replace(spec, width=0), "here")


def test_a_folder_with_a_damaged_config_is_refused_by_the_engine(tmp_path: Path) -> None:
    """What `POST /api/load-model` does: a worker must outlive it."""
    from safetensors.numpy import save_file

    from anytorch.text.embed.recipe import read_recipe

    config = {"model_type": "roberta", **CONFIGS["roberta"], "pad_token_id": -10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"embeddings.word_embeddings.weight": np.zeros((30, 8), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="pad_token_id is -10"):
        read_recipe(tmp_path)
