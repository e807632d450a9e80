"""config.json → EncoderSpec, and the names of the weights, for every family as transformers itself saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import ModelError
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.spec import READERS, EncoderSpec, read_spec
from anytorch.text.checkpoints.weights import EncoderWeights, is_optional, shapes

SIZES = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 36}
BERT: dict[str, Any] = {"model_type": "bert", **SIZES, "max_position_embeddings": 32}


def test_minilm(model_folder: Path) -> None:
    spec = read_spec(json.loads((model_folder / "config.json").read_text()))
    assert (spec.family, spec.layers, spec.width, spec.heads, spec.inner) == ("bert", 6, 384, 12, 1536)
    weights = EncoderWeights(Checkpoint(model_folder), spec)
    assert set(weights) == set(shapes(spec))
    assert weights["word"].shape == (30522, 384) and weights["layers.5.down.weight"].shape == (384, 1536)


def test_positions_begin_after_the_padding() -> None:
    spec = read_spec({**BERT, "model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1})
    assert (spec.family, spec.position_offset, spec.max_positions) == ("roberta", 2, 512)
    assert shapes(spec)["position"] == (514, 24)


def test_windows_and_thetas_per_layer() -> None:
    spec = read_spec({**BERT, "model_type": "modernbert", "local_attention": 16, "global_rope_theta": 5.0})
    assert spec.windows == (0, 8, 8, 0) and spec.rotary_thetas == (5.0, 10_000.0, 10_000.0, 5.0)
    causal = read_spec(
        {**BERT, "model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2,
         "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 1e6}
    )  # fmt: skip
    assert causal.windows == (0, 0, 7, 7) and causal.causal and causal.kv_heads == 2
    assert read_spec({**BERT, "model_type": "qwen3"}).windows == ()


def test_nomic_as_first_published() -> None:
    published = {
        "model_type": "nomic_bert", "vocab_size": 50, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_inner": 36,
        "n_positions": 8192, "max_trained_positions": 2048, "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
    }  # fmt: skip
    spec = read_spec(published)
    assert (spec.max_positions, spec.activation, spec.gated, spec.rotary_thetas) == (2048, "silu", True, (1000.0,) * 2)
    with pytest.raises(ModelError, match="variant"):
        read_spec({**published, "prenorm": True})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "clip"}, "model_type 'clip' is not a supported text encoder"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"hidden_act": "mish"}, "activation 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"model_type": "qwen3", "rope_scaling": {"type": "yarn"}}, "'yarn'"),
        ({"model_type": "qwen3", "num_key_value_heads": 3}, "4 heads cannot share 3"),
    ],
)
def test_what_cannot_be_read_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_spec({**BERT, **change})


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(ModelError, match=r"some/config\.json: 'hidden_size' is missing"):
        read_spec({k: v for k, v in BERT.items() if k != "hidden_size"}, where="some/config.json")


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"pad_token_id": 1}),
    "distilbert": ("DistilBert", {"dim": 24, "n_heads": 4, "n_layers": 4, "hidden_dim": 36}),
    "mpnet": ("MPNet", {}),
    "modernbert": ("ModernBert", {"pad_token_id": 0}),
    "nomic_bert": ("NomicBert", {}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_every_family_is_found(family: str, tmp_path: Path) -> None:
    """Saved by transformers, read by us: each name, each shape; and as part of a larger model, under a prefix."""
    transformers = pytest.importorskip("transformers")
    from safetensors.numpy import load_file, save_file

    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES, max_position_embeddings=40, **options)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    spec = read_spec(json.loads((tmp_path / "config.json").read_text()))
    assert spec.family == family
    weights = EncoderWeights(Checkpoint(tmp_path), spec)
    assert all(found in weights for found in shapes(spec) if not is_optional(found))
    used = {source.name for source in weights.sources.values()}
    unused = {found for found in Checkpoint(tmp_path).names() if found not in used and "pooler" not in found}
    assert not unused - {"embeddings.position_ids"}, "part of the model, and nobody reads it"
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({f"model.{key}": value for key, value in tensors.items()}, tmp_path / "model.safetensors")
    assert len(EncoderWeights(Checkpoint(tmp_path), spec)) == len(weights)
    if family == "qwen3":  # what no model of the family has is nobody's, so that whoever loads it can refuse it
        extra = {f"model.layers.0.self_attn.{odd}": np.ones(8, np.float32) for odd in ("q_norm.bias", "q_proj.gamma")}
        save_file(
            {**{f"model.{key}": value for key, value in tensors.items()}, **extra}, tmp_path / "model.safetensors"
        )
        sources = EncoderWeights(Checkpoint(tmp_path), spec).sources.values()
        assert not {source.name for source in sources} & set(extra)


def test_another_models_weights_are_refused(tmp_path: Path, model_folder: Path) -> None:
    checkpoint = Checkpoint(model_folder)
    config = json.loads((model_folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no tensor for 'layers\.6\.q\.weight'"):
        EncoderWeights(checkpoint, read_spec({**config, "num_hidden_layers": 7}))
    with pytest.raises(ModelError, match=r"the shape \[1536, 384\]; config\.json asks for \[1024, 384\]"):
        EncoderWeights(checkpoint, read_spec({**config, "intermediate_size": 1024}))
    with pytest.raises(ModelError, match=r"no tensor 'embed_tokens\.weight'"):
        EncoderWeights(checkpoint, read_spec({**config, "model_type": "qwen3"}))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("embeddings.tok_embeddings.weight", (), r"gives 'word' the shape \[\]"),
        ("layers.0.attn.Wqkv.weight", (73, 24), r"\[73, 24\] cannot be cut into 3 equal parts"),
        ("layers.0.attn.Wqkv.weight", (), r"\[\] cannot be cut into 3 equal parts"),
    ],
)
def test_tensors_of_an_odd_shape_are_refused(name: str, shape: tuple[int, ...], message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import numpy as np
    import transformers
    from safetensors.numpy import load_file, save_file

    config = transformers.ModernBertConfig(**SIZES, max_position_embeddings=40, pad_token_id=0)
    transformers.ModernBertModel(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert name in tensors
    save_file({**tensors, name: np.zeros(shape, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        EncoderWeights(Checkpoint(tmp_path), read_spec(json.loads((tmp_path / "config.json").read_text())))


def test_readers_give_specs() -> None:
    assert {kind for kind in READERS} >= {
        "bert",
        "roberta",
        "xlm-roberta",
        "distilbert",
        "mpnet",
        "modernbert",
        "qwen3",
    }
    assert EncoderSpec("bert", 1, 1, 1, 1, 1, 1).window(0) == 0
