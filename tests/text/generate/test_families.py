"""Many kinds of language models, tiny and with random weights: tokens are transformers' own, alone and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.text.generate.conftest import make_tokenizer  # noqa: E402

from anytorch.errors import ModelError  # noqa: E402
from anytorch.text.generate.generator import TextGenerator  # noqa: E402

BASE = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "max_position_embeddings": 512}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = "shared"  # computed in one batch
IN_TURNS = "in turns"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi3": (SHARED, LLAMA),
    "GPTNeoX": (SHARED, LLAMA),
    "OPT": (SHARED, {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                     "word_embed_proj_dim": 32}),
    "Qwen2": (SHARED, LLAMA),
    "Mixtral": (SHARED, {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": (SHARED, {**LLAMA, **EXPERTS, "num_experts": 4, "head_dim": 8, "decoder_sparse_step": 1}),
    "Starcoder2": (SHARED, LLAMA),
    "Olmo2": (SHARED, LLAMA),
    "Granite": (SHARED, LLAMA),
    "GPTJ": (SHARED, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 512}),
    "StableLm": (SHARED, LLAMA),
    "Cohere": (SHARED, LLAMA),
    "SmolLM3": (SHARED, LLAMA),
    "DeepseekV3": (SHARED, {**LLAMA, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "q_lora_rank": 16,
                            "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}),
    "Bloom": (IN_TURNS, {"hidden_size": 32, "n_layer": 2, "n_head": 4}),  # no positions to be given
    "GPT2": (SHARED, {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "Phi": (SHARED, LLAMA),
    "Gemma": (SHARED, {**LLAMA, "head_dim": 8}),
    "Falcon": (SHARED, {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "Qwen2Moe": (SHARED, {**LLAMA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "GPTNeo": (SHARED, {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 16,
                        "attention_types": [[["global", "local"], 1]]}),
    "Mpt": (IN_TURNS, {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}),
    "Mamba": (IN_TURNS, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "max_position_embeddings": None}),
    "Mamba2": (IN_TURNS, {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16,
                          "expand": 2, "n_groups": 1}),
    "Bamba": (IN_TURNS, {**LLAMA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
                         "attn_layer_indices": [1]}),
    "FalconH1": (IN_TURNS, {**LLAMA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
                            "mamba_n_groups": 1, "head_dim": 8}),
    "Lfm2": (IN_TURNS, {**LLAMA, "layer_types": ["conv", "full_attention"]}),
    "RecurrentGemma": (IN_TURNS, {**LLAMA, "lru_width": 32, "attention_window_size": 16}),
    "Gemma2": (IN_TURNS, {**LLAMA, "head_dim": 8, "sliding_window": 16}),
    "GptOss": (IN_TURNS, {**LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                          "sliding_window": 16}),
}  # fmt: skip
PROMPTS = ["The quick brown fox jumps over the lazy dog and then some more text", "x", "日本語のテキスト"]


def tiny(name: str, shape: dict[str, Any], folder: Path) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**BASE, "initializer_range": 0.3, **shape})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return make_tokenizer(folder)


OP_BY_OP = {"GPTNeo", "RecurrentGemma"}  # what the steps cannot do, and tell
OURS = {"Qwen2"}


def generated(model: Any, tokenizer: Any, prompt: str, count: int) -> list[int]:
    """The new tokens of transformers' own loop, without the one that ends a text."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    settings = {"do_sample": False, "pad_token_id": 1}
    with torch.no_grad():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)
    tokens: list[int] = made[0, ids.shape[1] :].tolist()
    return tokens[:-1] if tokens[-1] == 1 else tokens


def tokens_of(stream: Any) -> list[int]:
    list(stream)
    return list(stream._request.tokens[stream.prompt_tokens :])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_transformers_alone_and_together(name: str, kernel: str, tmp_path: Path) -> None:
    how, shape = FAMILIES[name]
    tokenizer = tiny(name, shape, tmp_path)
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    wanted = [generated(stored, tokenizer, prompt, 25) for prompt in PROMPTS]
    with TextGenerator(tmp_path, device="cpu", dtype="float32", kernel=kernel) as generator:
        for prompt, tokens in zip(PROMPTS, wanted, strict=True):
            assert tokens_of(generator.stream(prompt, max_tokens=25, temperature=0)) == tokens
        before = generator.stats
        with generator._scheduler._changed:  # the worker sees them all at once
            streams = [generator.stream(prompt, max_tokens=25, temperature=0) for prompt in PROMPTS]
        assert [tokens_of(stream) for stream in streams] == wanted
        made, steps = generator.stats.tokens - before.tokens, generator.stats.steps - before.steps
        facts = generator.describe()
    stepped = kernel == "auto" and name not in OP_BY_OP
    if name not in OURS or kernel == "off":
        assert facts["decoding"] == ("ModelSteps" if stepped else "transformers")
    assert (made > 1.5 * steps) == (stepped or how == SHARED)


def test_angles_that_follow_the_length_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3's: a prompt is read in one go, a text beside longer ones has its own, and all turn where the text grows long."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "factor": 16.0}
    long = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    tokenizer = tiny("Phi3", {**LLAMA, "original_max_position_embeddings": 32, "rope_parameters": long}, tmp_path)
    stored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = [PROMPTS[0] * 2, *PROMPTS]
    wanted = [generated(stored, tokenizer, prompt, 40) for prompt in prompts]
    monkeypatch.setattr("anytorch.text.generate.scheduler.PORTION", 32)
    with TextGenerator(tmp_path, device="cpu", dtype="float32") as generator:
        streams = [generator.stream(prompt, max_tokens=40, temperature=0) for prompt in prompts]
        lengths = [stream.prompt_tokens for stream in streams]
        assert lengths[0] > 64 and min(lengths) + 10 < 32  # longer than two portions; far from where it turns
        assert [tokens_of(stream) for stream in streams] == wanted


def test_a_model_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    tiny("Rwkv", {"hidden_size": 32, "num_hidden_layers": 2}, tmp_path)
    with pytest.raises(ModelError, match="takes no cache"):
        TextGenerator(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("Bert", "BertForMaskedLM", {**LLAMA, "max_position_embeddings": 64}),
        ("T5", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    ],
)
def test_models_that_do_not_write_from_left_to_right_are_refused(
    name: str, kind: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    config = getattr(transformers, f"{name}Config")(vocab_size=320, **shape)
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=f"{name.lower()} is not a causal language model: it cannot continue a text"):
        TextGenerator(tmp_path, device="cpu")
