"""Our decoders beside transformers': random weights of every family, every variant of the rotary embedding, caches."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import anytorch
from anytorch.errors import InputError, ModelError
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.spec import read_spec

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama 3": ("Llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2 with a window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied, yarn": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {**YARN, "beta_fast": 8}},
    ),
    "qwen3 with a window": (
        "Qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
}


def _theirs(name: str, **more: Any) -> Any:
    family, options = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # weights of norms and biases that do something
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def _ids(n: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 97, (rows, n), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    theirs, ids = _theirs(name), _ids(40)
    theirs.save_pretrained(tmp_path)
    ours = anytorch.load_decoder(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["llama 3", "mistral with a window", "qwen2 with a window", "qwen3"])
def test_a_cache_gives_what_the_whole_text_gives(name: str, tmp_path: Path) -> None:
    _theirs(name).save_pretrained(tmp_path)
    decoder, ids = anytorch.load_decoder(tmp_path), _ids(30)
    kept = decoder.new_cache(rows=2, positions=30)
    ends = [0, 11, 18, *range(19, 31)]
    with torch.no_grad():
        whole = decoder(ids)
        parts = [decoder(ids[:, begin:end], kept) for begin, end in pairwise(ends)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-5, atol=2e-5)
    with pytest.raises(InputError, match="31 tokens do not fit: there is room for 30"):
        decoder(ids[:, :1], kept)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_as_near_as_transformers(dtype: str, tmp_path: Path) -> None:
    theirs, ids = _theirs("qwen3"), _ids(20)
    with torch.no_grad():
        truth = theirs.double()(ids).logits
        half = theirs.to(getattr(torch, dtype))
        half.save_pretrained(tmp_path)
        ours = anytorch.load_decoder(tmp_path)
        assert ours.lm_head.weight.dtype == getattr(torch, dtype)  # as it is stored
        own, other = ((made.double() - truth).abs().max() for made in (ours(ids), half(ids).logits))
    assert own < 2 * other
    assert anytorch.load_decoder(tmp_path, dtype="float32").lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_are_made_where_large_pages_were_asked_for(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _theirs("qwen3").to(torch.bfloat16).save_pretrained(tmp_path)
    asked: list[range] = []
    monkeypatch.setattr("anytorch.large_pages.ask", lambda begin, nbytes: asked.append(range(begin, begin + nbytes)))
    for name, weight in anytorch.load_decoder(tmp_path, "cpu", dtype).named_parameters():
        assert any(weight.data_ptr() in one and weight.data_ptr() + weight.nbytes - 1 in one for one in asked), name


def test_several_files_a_body_alone_and_files_of_earlier_years(tmp_path: Path) -> None:
    theirs, ids = _theirs("llama 3", tie_word_embeddings=True), _ids(12)
    theirs.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    theirs.model.save_pretrained(tmp_path / "body")  # names without "model."
    (tmp_path / "earlier").mkdir()
    theirs.save_pretrained(tmp_path / "earlier")
    path = tmp_path / "earlier" / "config.json"
    config = json.loads(path.read_text())
    rotary = config.pop("rope_parameters")
    config["rope_theta"] = rotary.pop("rope_theta")
    path.write_text(json.dumps({**config, "rope_scaling": rotary}))
    with torch.no_grad():
        expected = theirs(ids).logits
        for folder in ("several", "body", "earlier"):
            torch.testing.assert_close(anytorch.load_decoder(tmp_path / folder)(ids), expected, rtol=2e-5, atol=2e-5)


LINEAR = {"type": "linear", "factor": 3.0}
OTHER_WRITERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int]] = {  # written, left out, the longest window
    "both tables": ("llama", {"rope_theta": 500.0, "rope_scaling": LINEAR}, (), 0),
    "a first length beside the table": ("qwen2, yarn", {"original_max_position_embeddings": 8}, (), 0),
    "no length": ("mistral", {}, ("max_position_embeddings",), 4096),
    "no window": ("mistral", {}, ("sliding_window",), 4096),
    "no first layer with a window": ("qwen2 with a window", {}, ("max_window_layers", "layer_types"), 0),
    "no window where windows are used": ("qwen3 with a window", {}, ("sliding_window", "layer_types"), 4096),
    "kinds of layers": (
        "mistral with a window",
        {"layer_types": ["full_attention", *2 * ["sliding_attention"]]},
        (),
        7,
    ),
}


@pytest.mark.parametrize("name", OTHER_WRITERS)
def test_what_config_json_leaves_out_or_says_twice_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    of, written, left_out, longest = OTHER_WRITERS[name]
    _theirs(of).save_pretrained(tmp_path)
    path, ids = tmp_path / "config.json", _ids(40)
    config = {**json.loads(path.read_text()), **written}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in left_out}))
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), anytorch.load_decoder(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=2e-5, atol=2e-5)
    assert ours.spec.max_positions == theirs.config.max_position_embeddings
    assert max(ours.spec.windows) == longest


@pytest.mark.parametrize("own", [False, True])
def test_a_stored_head_that_is_not_the_table_of_words_is_used(own: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _theirs("llama, tied").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    table = stored["model.embed_tokens.weight"]
    stored["lm_head.weight"] = torch.randn_like(table) if own else table.clone()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    theirs, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), _ids(12)
    ours = anytorch.load_decoder(tmp_path)
    assert ours.spec.tied == (not own)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=2e-5, atol=2e-5)


def test_a_folder_that_is_not_whole_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(ModelError, match="has no config"):
        anytorch.load_decoder(tmp_path)
    _theirs("qwen3").save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    whole = load_file(weights)

    def refused(match: str, tensors: dict[str, torch.Tensor] | None = None, **changed: Any) -> None:
        save_file(whole if tensors is None else tensors, weights)
        (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
        with pytest.raises(ModelError, match=match):
            anytorch.load_decoder(tmp_path)

    first = "model.layers.0.mlp.up_proj.weight"
    refused(
        "no values for 1 parameters, such as model.layers.0.mlp.up_proj", {k: v for k, v in whole.items() if k != first}
    )
    refused(r"up_proj.weight is \[3, 4\]; config.json asks for \[56, 32\]", {**whole, first: torch.ones(3, 4)})
    refused("holds model.layers.0.mlp.experts", {**whole, "model.layers.0.mlp.experts.0.w": torch.ones(2)})
    refused("model_type is 'gemma'", model_type="gemma")
    refused("rotary embedding 'longrope'", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    refused("num_hidden_layers", num_hidden_layers=10**9)
    refused("4 heads of width 7", head_dim=7)
    refused("4 heads of width 16 with 3 heads of keys", num_key_value_heads=3)
    refused("hidden_act is 'gelu'", hidden_act="gelu")
    refused("rms_norm_eps", rms_norm_eps=-1)
    refused("layer_types is not 3", use_sliding_window=True, sliding_window=4, layer_types=["other"] * 3)
    (tmp_path / "config.json").write_text("[" * 5000)
    with pytest.raises(ModelError, match="cannot be read"):
        anytorch.load_decoder(tmp_path)


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    config = {**SMALL, "model_type": "llama"}
    decoder = Decoder(read_spec(config, "a config.json"))
    with pytest.raises(InputError, match="65 tokens do not fit: there is room for 64"):
        decoder(_ids(65))
    for ids in (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2)):
        with pytest.raises(InputError, match="token ids are"):
            decoder(ids)


def test_gradients_are_transformers(tmp_path: Path) -> None:
    theirs, ids = _theirs("qwen3"), _ids(10)
    theirs.save_pretrained(tmp_path)
    ours = anytorch.load_decoder(tmp_path).requires_grad_(True)
    for model in (ours, theirs):
        made = model(ids)
        (made if isinstance(made, torch.Tensor) else made.logits).square().mean().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("written", [{"original_max_position_embeddings": 16}, {}])
def test_texts_are_as_long_as_yarn_stretches_a_first_length_that_is_told(
    written: dict[str, Any], tmp_path: Path
) -> None:
    """Qwen's files leave max_position_embeddings at the first length."""
    scaling = {"type": "yarn", "factor": 4.0, **written}
    _theirs("qwen2").save_pretrained(tmp_path)
    path, ids = tmp_path / "config.json", _ids(60 if written else 16)
    config = {**json.loads(path.read_text()), "max_position_embeddings": 16, "rope_theta": 1e4, "rope_scaling": scaling}
    path.write_text(json.dumps(config))
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), anytorch.load_decoder(tmp_path)
    assert ours.spec.max_positions == (64 if written else 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=2e-5, atol=2e-5)
