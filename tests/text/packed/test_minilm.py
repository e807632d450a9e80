"""The real all-MiniLM-L6-v2 on real sentences: the accuracy each format promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from anytorch.text.checkpoints.checkpoint import Checkpoint  # noqa: E402
from anytorch.text.checkpoints.spec import read_spec  # noqa: E402
from anytorch.text.checkpoints.weights import EncoderWeights  # noqa: E402
from anytorch.text.packed import PackedEncoder  # noqa: E402

LICENCE = Path(__file__).parents[3] / "LICENSE"


@pytest.fixture(scope="module")
def folder(minilm: Path) -> Path:
    return minilm


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[np.ndarray]:
    """Sentences and paragraphs of our own licence: natural English of 5 to 256 tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    paragraphs = [" ".join(text.split()) for text in LICENCE.read_text().split("\n\n")]
    texts = [text for text in paragraphs if len(text) > 20]
    return [np.array(one.ids, np.int32) for one in tokenizer.encode_batch(texts)][:40]


@pytest.fixture(scope="module")
def expected(folder: Path, tokens: list[np.ndarray]) -> np.ndarray:
    model: Any = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    vectors = []
    with torch.no_grad():
        for ids in tokens:
            mean = model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].mean(0)
            vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize(
    ("quantization", "mean", "least"),
    [(None, 0.999999, 0.99999), ("int8", 0.999, 0.99), ("int4", 0.98, 0.95), ("fp4", 0.95, 0.90)],
)
def test_cosine(
    quantization: str | None, mean: float, least: float, folder: Path, tokens: list[np.ndarray], expected: np.ndarray
) -> None:
    spec = read_spec(json.loads((folder / "config.json").read_text()))
    weights = EncoderWeights(Checkpoint(folder), spec)
    starts = np.cumsum([0, *map(len, tokens)]).astype(np.int32)
    with PackedEncoder(spec, weights, normalize=True, quantization=quantization, threads=1) as encoder:
        cosine = (encoder.run(np.concatenate(tokens), starts) * expected).sum(1)
    assert len(tokens) > 20
    assert cosine.mean() >= mean and cosine.min() >= least, (cosine.mean(), cosine.min())
