"""The real model with the C++ encoder, beside sentence-transformers; and small random models of every family."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from anytorch.text.embed.engine import ArrowEngine

LAVAPIPE = Path(__file__).resolve().parents[3] / ".cache" / "mesa" / "lvp.json"


@pytest.fixture(scope="module")
def reference(sentence_transformers: Any, model_folder: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")


def load_reference(sentence_transformers: Any, folder: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


@pytest.mark.long
def test_same_vectors_as_sentence_transformers(
    real_engine: Callable[..., ArrowEngine], reference: Any, corpus: Any, cosine: Any
) -> None:
    texts = [*corpus.sentences(120), *corpus.passages(3), "", "日本語", "a", "word " * 300]
    engine = real_engine()
    found, wanted = engine.encode(texts), reference.encode(texts)
    assert cosine(found, wanted).min() >= 0.99999
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert engine.stats.truncated >= 1
    np.testing.assert_allclose(engine.similarity(texts[:10]), reference.similarity(wanted[:10], wanted[:10]), atol=1e-4)


@pytest.mark.slow
def test_same_vectors_over_thousands_of_texts(
    real_engine: Callable[..., ArrowEngine], reference: Any, corpus: Any, cosine: Any
) -> None:
    texts = [*corpus.sentences(2000), *corpus.passages(200)]
    assert cosine(real_engine().encode(texts), reference.encode(texts)).min() >= 0.99999


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int2", "fp4"])
def test_a_vector_is_the_same_bits_alone_and_in_any_batch(
    quantization: str | None, real_engine: Callable[..., ArrowEngine], corpus: Any
) -> None:
    texts = [*corpus.sentences(25), *corpus.passages(1)]
    whole = real_engine(quantization=quantization).encode(texts)
    small = real_engine(quantization=quantization, batch_tokens=32, threads=1)
    assert np.array_equal(small.encode(texts[::-1]), whole[::-1])
    for number in (0, 17, 25):
        assert np.array_equal(small.encode(texts[number]), whole[number])


@pytest.mark.parametrize(("quantization", "mean", "least"), [("int8", 0.999, 0.99), ("int4", 0.98, 0.9)])
def test_quantized_vectors_stay_close(
    quantization: str, mean: float, least: float, real_engine: Callable[..., ArrowEngine], corpus: Any, cosine: Any
) -> None:
    texts = [*corpus.sentences(40), *corpus.passages(2)]
    engine = real_engine(quantization=quantization)
    close = cosine(engine.encode(texts), real_engine().encode(texts))
    assert close.mean() >= mean and close.min() >= least
    assert f"quantization: {quantization}" in engine.explain()


@pytest.mark.long
@pytest.mark.parametrize(
    ("quantization", "mean", "least"),
    [
        pytest.param("int8", 0.999, 0.99, marks=pytest.mark.slow),
        ("int4", 0.98, 0.95),
        pytest.param("fp4", 0.975, 0.92, marks=pytest.mark.slow),
    ],
)
def test_quantized_vectors_stay_close_by_torch_too(
    quantization: str, mean: float, least: float, model_folder: Path, monkeypatch: pytest.MonkeyPatch,
    real_engine: Callable[..., ArrowEngine], corpus: Any, cosine: Any,
) -> None:  # fmt: skip
    """As on any device but the CPU, where torch computes. Over 2,000 sentences and 200 passages: docs/concepts."""
    pytest.importorskip("torch")
    from anytorch.errors import NativeUnavailable
    from anytorch.text.embed import encoder_device

    def not_here(*_: object) -> Any:
        raise NativeUnavailable("no compiler, says the test")

    texts = [*corpus.sentences(40), *corpus.passages(2)]
    wanted = real_engine().encode(texts)
    monkeypatch.setattr(encoder_device, "_packed", not_here)
    with ArrowEngine(model_folder, "cpu", quantization=quantization) as engine:
        close = cosine(engine.encode(texts), wanted)
        assert "torch on the CPU" in engine.explain()
    assert close.mean() >= mean and close.min() >= least, (close.mean(), close.min())


def test_the_first_vector_comes_without_torch(run_python: Any, real_cache: Path, real_engine: Any) -> None:
    real_engine()  # compiles
    done = run_python(
        "import sys, anytorch\n"
        "vector = anytorch.ArrowEngine().encode('Hello, world!')\n"
        "assert vector.shape == (384,)\n"
        "heavy = {'torch', 'transformers', 'sentence_transformers', 'pyarrow', 'pandas', 'huggingface_hub', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n",
        env={"ANYTORCH_CACHE_DIR": str(real_cache)},
    )
    assert done.returncode == 0


def test_without_a_compiler_torch_computes_and_explain_says_so(
    model_folder: Path,
    real_engine: Callable[..., ArrowEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    corpus: Any,
) -> None:
    pytest.importorskip("torch")
    texts = corpus.sentences(20)
    wanted = real_engine().encode(texts)
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path / "empty-cache"))
    monkeypatch.setenv("ANYTORCH_CXX", "/no/such/compiler")
    with ArrowEngine(model_folder, "cpu") as engine:
        np.testing.assert_allclose(engine.encode(texts), wanted, atol=2e-5)
        assert "torch on the CPU, because our own C++ encoder cannot be used" in engine.explain()


@pytest.mark.long
def test_half_precision_on_the_cpu_is_torchs(model_folder: Path, corpus: Any, cosine: Any, real_engine: Any) -> None:
    pytest.importorskip("torch")
    texts = corpus.sentences(20)
    with ArrowEngine(model_folder, "cpu", dtype="bfloat16") as engine:
        assert cosine(engine.encode(texts), real_engine().encode(texts)).min() >= 0.9995
        assert "dtype='bfloat16' was requested" in engine.explain()


# --- small random models of every family, saved by sentence-transformers -------------------------------------------------

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
POSITIONS = {"vocab_size": 30522, "max_position_embeddings": 66}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SIZES, **POSITIONS}),
    "roberta": ("Roberta", {**SIZES, **POSITIONS, "pad_token_id": 0}),
    "distilbert": ("DistilBert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, **POSITIONS}),
    "mpnet": ("MPNet", {**SIZES, **POSITIONS, "pad_token_id": 0}),
    "modernbert": ("ModernBert", {**SIZES, **POSITIONS, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 101,
                                  "sep_token_id": 102, "bos_token_id": 101, "eos_token_id": 102}),
    "nomic_bert": ("NomicBert", {**SIZES, **POSITIONS, "pad_token_id": 0}),
    "qwen3": ("Qwen3", {**SIZES, **POSITIONS, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}),
}  # fmt: skip
TEXTS = ["Hello, world!", "a", "a somewhat longer text, with more words than the others " * 3, "three short words", ""]


def make_folder(family: str, model_folder: Path, folder: Path) -> Path:
    """A transformer with random weights and the default model's tokenizer."""
    import torch
    import transformers

    name, options = FAMILIES[family]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(model_folder / file, folder / file)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 60}))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_a_plain_folder(
    family: str, model_folder: Path, tmp_path: Path, real_engine: Any, sentence_transformers: Any, cosine: Any
) -> None:
    folder = make_folder(family, model_folder, tmp_path / family)
    engine = real_engine(folder)
    reference = load_reference(sentence_transformers, folder)
    wanted = reference.encode(TEXTS)
    assert engine.max_length == reference.max_seq_length == 60
    found = engine.encode(TEXTS)
    assert cosine(found, wanted).min() >= 0.99999
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "pooling", ["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ("cls", "max")]
)
def test_a_folder_with_every_module(
    pooling: Any, model_folder: Path, tmp_path: Path, real_engine: Any, sentence_transformers: Any, cosine: Any
) -> None:
    from sentence_transformers.sentence_transformer import modules as models

    transformer = models.Transformer(str(make_folder("bert", model_folder, tmp_path / "plain")), max_seq_length=40)
    pool = models.Pooling(32, pooling_mode=pooling)
    width = 32 * (2 if isinstance(pooling, tuple) else 1)
    modules = [transformer, pool, models.Dense(width, 24), models.LayerNorm(24), models.Normalize()]
    prompts = {"query": "Find: ", "document": ""}
    saved = sentence_transformers.SentenceTransformer(modules=modules, device="cpu", prompts=prompts)
    saved.save(str(tmp_path / "saved"))
    engine = real_engine(tmp_path / "saved")
    assert engine.dim == 24 and engine.max_length == 40 and engine.prompts == prompts
    np.testing.assert_allclose(engine.encode(TEXTS), saved.encode(TEXTS), atol=2e-5)
    np.testing.assert_allclose(engine.encode(TEXTS, prompt="query"), saved.encode_query(TEXTS), atol=2e-5)
    short = saved.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(engine.encode(TEXTS, dim=8), short, atol=2e-5)


@pytest.mark.long
def test_a_software_adapter_answers_from_an_empty_cache(
    run_script: Any, real_engine: Any, cosine: Any, tmp_path: Path, missing: Callable[[str, str], NoReturn]
) -> None:
    """How long it takes: bench/webgpu_first_answer.py. Measuring layouts, which took minutes, is bounded by `measure_s`."""
    if not LAVAPIPE.exists():
        missing("webgpu-adapter", "tools/software-vulkan.sh")
    told = run_script(
        f"""
        import anytorch
        engine = anytorch.ArrowEngine(device="vulkan")
        answer(vectors=engine.encode({TEXTS!r}).tolist(), device=engine.device, text=engine.explain())
        """,
        {
            "VK_ICD_FILENAMES": str(LAVAPIPE), "XDG_RUNTIME_DIR": "/tmp", "ANYTORCH_CACHE_DIR": str(tmp_path),
            "ANYTORCH_STRICT": "1",
        },
    )  # fmt: skip
    assert told["device"] == "webgpu:0", told["text"]
    assert cosine(told["vectors"], real_engine().encode(TEXTS)).min() >= 0.9999


@pytest.mark.slow
def test_another_torch_device(
    npu_extension: Any, model_folder: Path, tmp_path: Path, real_engine: Any, cosine: Any
) -> None:
    """The compiled test device: torch's path, half precision, the compiled tokenizer, rows written by the encoder."""
    folder = make_folder("bert", model_folder, tmp_path / "bert")
    told = npu_extension.run(
        f"""
        import anytorch
        engine = anytorch.ArrowEngine({str(folder)!r}, device="npu", normalize=True)
        answer(vectors=engine.encode({TEXTS!r} * 20).tolist(), device=engine.device, text=engine.explain())
        """
    )
    assert told["device"] == "npu:0" and "device: npu:0, because you asked for 'npu'" in told["text"]
    assert cosine(told["vectors"], real_engine(folder).encode(TEXTS * 20)).min() >= 0.9995
    np.testing.assert_allclose(np.linalg.norm(told["vectors"], axis=1), 1, atol=1e-3)
