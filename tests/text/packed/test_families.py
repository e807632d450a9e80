"""Every family of encoder against transformers' own module, with random weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from anytorch import native  # noqa: E402
from anytorch.text.checkpoints.checkpoint import Checkpoint  # noqa: E402
from anytorch.text.checkpoints.spec import read_spec  # noqa: E402
from anytorch.text.checkpoints.weights import EncoderWeights  # noqa: E402
from anytorch.text.packed import POOLINGS, PackedEncoder  # noqa: E402

LENGTHS = (1, 7, 33, 2, 64, 18)
COMMON = {"vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT = {**COMMON, "intermediate_size": 80, "max_position_embeddings": 80}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "bert_relu": ("Bert", {**BERT, "hidden_act": "relu"}),
    "bert_odd_sizes": ("Bert", {**BERT, "hidden_size": 45, "num_attention_heads": 5, "intermediate_size": 37}),
    "bert_wide_heads": ("Bert", {**BERT, "hidden_size": 192, "num_attention_heads": 2}),
    "roberta": ("Roberta", {**BERT, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRoberta", {**BERT, "hidden_act": "gelu_new", "pad_token_id": 1}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 99, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 80},
    ),
    "mpnet": ("MPNet", {**BERT, "relative_attention_num_buckets": 32}),
    "modernbert": (
        "ModernBert",
        {**BERT, "local_attention": 16, "num_hidden_layers": 4, "global_attn_every_n_layers": 3, "pad_token_id": 0},
    ),
    "nomic_bert": ("NomicBert", {**BERT, "max_position_embeddings": 80}),
    "qwen3": ("Qwen3", {**BERT, "num_key_value_heads": 2, "head_dim": 16}),
}


def build(name: str, folder: Path) -> tuple[Any, Any, EncoderWeights]:
    """transformers' module with random weights of a size that shows mistakes, its spec, and its weights as we read them."""
    kind, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(3)
    with torch.no_grad():
        model = getattr(transformers, f"{kind}Model")(config).eval()
        for label, parameter in model.named_parameters():
            if "norm" in label.lower() and label.endswith("weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.dim() > 1 else 0.1))
    model.save_pretrained(folder)
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    return model, spec, EncoderWeights(Checkpoint(folder), spec)


def texts(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocabulary, length).astype(np.int32) for length in lengths]


def pack(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.concatenate([*sequences, np.empty(0, np.int32)]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum([len(s) for s in sequences])]).astype(np.int32)
    return ids, starts


def reference(model: Any, sequence: np.ndarray) -> np.ndarray:
    """In float64: torch's float32 is less exact than ours on CPUs without fused multiply-add."""
    with torch.no_grad():
        ids = torch.from_numpy(sequence.astype(np.int64))[None]
        exact = copy.deepcopy(model).double()
        return exact(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].numpy()


def pooled(tokens: np.ndarray, pooling: str) -> np.ndarray:
    if pooling in ("weighted_mean", "weightedmean"):
        weights = np.arange(1, len(tokens) + 1)[:, None]
        return (tokens * weights).sum(0) / weights.sum()
    return {
        "cls": lambda: tokens[0],
        "mean": lambda: tokens.mean(0),
        "max": lambda: tokens.max(0),
        "last": lambda: tokens[-1],
        "lasttoken": lambda: tokens[-1],
        "mean_sqrt_length": lambda: tokens.sum(0) / np.sqrt(len(tokens)),
        "mean_sqrt_len_tokens": lambda: tokens.sum(0) / np.sqrt(len(tokens)),
    }[pooling]()


@pytest.mark.parametrize("level", native.supported())
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_transformers(family: str, level: str, tmp_path: Path) -> None:
    model, spec, weights = build(family, tmp_path)
    sequences = texts(spec.vocabulary)
    expected = [reference(model, sequence) for sequence in sequences]
    ids, starts = pack(sequences)
    with PackedEncoder(spec, weights, threads=2, level=level) as encoder:
        tokens = encoder.tokens(ids, starts)
        assert np.abs(tokens - np.concatenate(expected)).max() < 2e-5
        for encoder.pooling in POOLINGS:
            found = encoder.run(ids, starts)
            wanted = np.stack([pooled(one, encoder.pooling) for one in expected])
            # Larger than a mean by the root of the length, and so is its error.
            larger = max(LENGTHS) ** 0.5 if encoder.pooling.startswith("mean_sqrt") else 1
            assert np.abs(found - wanted).max() < 2e-5 * larger, encoder.pooling


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_longer_than_a_block_of_keys(family: str, tmp_path: Path) -> None:
    """Beyond 512 keys the softmax is carried from block to block."""
    kind, options = FAMILIES[family]
    FAMILIES["long"] = (kind, {**options, "max_position_embeddings": 1200})
    try:
        model, spec, weights = build("long", tmp_path)
    finally:
        del FAMILIES["long"]
    (sequence,) = texts(spec.vocabulary, (1100,))
    with PackedEncoder(spec, weights, threads=1) as encoder:
        assert np.abs(encoder.tokens(*pack([sequence])) - reference(model, sequence)).max() < 5e-5


def test_half_precision_checkpoints(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model, _, _ = build("bert", tmp_path)
        model.to(dtype).save_pretrained(tmp_path / str(dtype))
        spec = read_spec(json.loads((tmp_path / str(dtype) / "config.json").read_text()))
        (sequence,) = texts(spec.vocabulary, (20,))
        with PackedEncoder(spec, EncoderWeights(Checkpoint(tmp_path / str(dtype)), spec), threads=1) as encoder:
            found = encoder.tokens(*pack([sequence]))
        assert np.abs(found - reference(model.float(), sequence)).max() < 2e-5
