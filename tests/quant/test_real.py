"""The real all-MiniLM-L6-v2: what rounding does to its vectors, in the numbers the project promises."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anytorch.quant import load, quantize, save

ROOT = Path(__file__).parents[2]


class Embedder:
    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel

        sys.path.insert(0, str(ROOT / "bench"))
        try:
            from corpus import sentences
        finally:
            sys.path.remove(str(ROOT / "bench"))
        self.empty: Callable[[], nn.Module] = lambda: BertModel(BertConfig.from_pretrained(folder)).eval()
        self.model = BertModel.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(48)
        tokenizer.enable_padding()
        texts = sentences(600)
        self.tried = self._batches(tokenizer, sorted(texts[:64], key=len))
        self.examples = self._batches(tokenizer, sorted(texts[500:], key=len))
        self.wanted = self.embed(self.model)

    @staticmethod
    def _batches(tokenizer: Any, texts: list[str]) -> list[dict[str, torch.Tensor]]:
        found = []
        for start in range(0, len(texts), 16):
            encoded = tokenizer.encode_batch(texts[start : start + 16])
            mask = torch.tensor([one.attention_mask for one in encoded])
            found.append({"input_ids": torch.tensor([one.ids for one in encoded]), "attention_mask": mask})
        return found

    @torch.no_grad()
    def embed(self, model: nn.Module) -> torch.Tensor:
        parts = []
        for batch in self.tried:
            mask = batch["attention_mask"].unsqueeze(-1)
            parts.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
        return nn.functional.normalize(torch.cat(parts), dim=1)

    def cosines(self, model: nn.Module) -> torch.Tensor:
        return (self.embed(model) * self.wanted).sum(1)


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> Embedder:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQDM_DISABLE", "1")
        return Embedder(minilm)


def test_int8_vectors_are_nearly_the_same(embedder: Embedder, tmp_path: Path) -> None:
    model = copy.deepcopy(embedder.model)
    report = quantize(model, "int8")
    assert report.nbytes_after / report.nbytes_before <= 0.30
    cosines = embedder.cosines(model)
    assert cosines.mean() >= 0.999 and cosines.min() >= 0.99
    # And the file gives the same vectors, to the bit.
    save(model, tmp_path)
    again = load(embedder.empty(), tmp_path)
    assert torch.equal(embedder.embed(again), embedder.embed(model))


def test_int4_without_examples(embedder: Embedder) -> None:
    model = copy.deepcopy(embedder.model)
    report = quantize(model, "int4")
    assert report.nbytes_after / report.nbytes_before <= 0.19
    assert 0.95 <= embedder.cosines(model).mean() < 0.98  # not enough: the next test is how it is done


@pytest.mark.slow
def test_int4_with_examples_keeps_the_promise(embedder: Embedder) -> None:
    model = copy.deepcopy(embedder.model)
    report = quantize(model, "int4", calibration=embedder.examples)
    assert report.nbytes_after / report.nbytes_before <= 0.19
    assert embedder.cosines(model).mean() >= 0.98
