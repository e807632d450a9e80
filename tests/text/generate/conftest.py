"""Tiny models with random weights, and a tokenizer trained on a few sentences: nothing is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Größe, Überraschung, naïve café — 日本語のテキスト, русский текст, emoji 🙂🚀👩‍🚀.",
    "One token after another token makes a text, and a text makes a page.",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path, *, chat: bool = True) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<begin>", "<end>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<begin>", eos_token="<end>")
    if chat:
        whole.chat_template = TEMPLATE
    whole.save_pretrained(folder)
    return whole


def make_model(folder: Path, family: str, **changes: Any) -> Any:
    """A folder with a random model whose tokens are far from alike: greedy text is long and not one token for ever."""
    import transformers

    torch.manual_seed(7)
    shape: dict[str, Any] = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
    if family == "gpt2":
        shape |= {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
        config: Any = transformers.GPT2Config(**{**shape, **changes})
        kind: Any = transformers.GPT2LMHeadModel
    else:
        shape |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False}
        if family == "qwen3":
            shape |= {"head_dim": 8}
        names = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral"}
        config = getattr(transformers, f"{names[family]}Config")(**{**shape, **changes})
        kind = getattr(transformers, f"{names[family]}ForCausalLM")
    model = kind(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for family in ("llama", "qwen3", "gpt2", "mistral"):
        folder = tmp_path_factory.mktemp(family)
        make_model(folder, family, **({"sliding_window": 16} if family == "mistral" else {}))
        make_tokenizer(folder)
        folders[family] = folder
    return folders


@pytest.fixture(autouse=True)
def built_cache(isolation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for packed layers are compiled once on a machine, with those of the tests of anytorch.quant."""
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(Path(__file__).parents[3] / ".cache" / "quant"))


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading 256 MiB for each test says nothing; one test measures for real."""
    from anytorch.text.generate import bandwidth, generator

    monkeypatch.setattr(generator, "bandwidth_of", lambda device: bandwidth.Bandwidth(10.0, "measured"))


@pytest.fixture(params=["HostKernel", "RecordedSteps", "ModelSteps", "transformers"])
def llama(models: dict[str, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A generator for every way to compute tokens: what it does must not depend on it."""
    from anytorch.text.generate import loading
    from anytorch.text.generate.generator import TextGenerator

    if request.param == "RecordedSteps":
        without_compiler(monkeypatch)
    if request.param == "ModelSteps":  # as if it were another family
        monkeypatch.setattr(loading, "FAMILIES", ())
    kernel = "off" if request.param == "transformers" else "auto"
    with TextGenerator(models["llama"], device="cpu", kernel=kernel) as generator:
        assert generator.describe()["decoding"] == request.param
        yield generator


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    from anytorch.errors import CompilerMissing
    from anytorch.text.generate import kernel

    def missing(*_: Any) -> Any:
        raise CompilerMissing("there is no C++ compiler")

    patch.setattr(kernel.HostKernel, "__init__", missing)
