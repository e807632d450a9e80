"""Checkpoints with random weights of every family, saved by transformers itself, and its answers to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SMALL = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 80}
COMMON = {"vocab_size": 120, "max_position_embeddings": 64}
# Configuration class, and what it is made with. Odd sizes on purpose: a transposed or swapped axis shows.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", {**SMALL, **COMMON, "num_attention_heads": 3}),  # heads of 16, which our kernels take
    "bert-tanh": ("BertConfig", {**SMALL, **COMMON, "hidden_act": "gelu_new", "type_vocab_size": 1}),
    "roberta": ("RobertaConfig", {**SMALL, **COMMON, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRobertaConfig", {**SMALL, **COMMON, "pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": ("DistilBertConfig", {"dim": 48, "n_heads": 4, "n_layers": 3, "hidden_dim": 80, **COMMON}),
    "mpnet": ("MPNetConfig", {**SMALL, **COMMON, "pad_token_id": 1}),
    "modernbert": (
        "ModernBertConfig",
        # A window of 4 to either side: texts of 30 tokens are longer than it.
        {**SMALL, **COMMON, "local_attention": 8, "pad_token_id": 0, "num_hidden_layers": 4, "cls_token_id": 2,
         "eos_token_id": 3, "bos_token_id": 2, "sep_token_id": 3},
    ),
    "nomic_bert": ("NomicBertConfig", {**SMALL, **COMMON, "pad_token_id": 0}),
    "qwen3": (
        "Qwen3Config",
        {**SMALL, **COMMON, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 2,
         "eos_token_id": 3},
    ),
}  # fmt: skip
LENGTHS = (7, 1, 30, 13, 2, 29, 30, 8)  # odd, one token, equal ones, not sorted


def make_model(family: str) -> Any:
    """transformers' own module with random weights large enough that an error shows, biases and norms included."""
    import torch
    import transformers

    kind, options = FAMILIES[family]
    config = getattr(transformers, kind)(**options, attn_implementation="eager")
    torch.manual_seed(sum(map(ord, family)))
    models: Any = transformers.AutoModel
    model = models.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if name.endswith("weight") else 0.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint_folder(family)` → a folder with config.json and model.safetensors."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_model(family).save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def open_model(checkpoint_folder: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """`open_model(family)` → the EncoderSpec and the open Checkpoint."""
    from anytorch.text.checkpoints.checkpoint import Checkpoint
    from anytorch.text.checkpoints.spec import read_spec

    def open_one(family: str) -> tuple[Any, Any]:
        folder = checkpoint_folder(family)
        return read_spec(json.loads((folder / "config.json").read_text())), Checkpoint(folder)

    return open_one


@pytest.fixture(scope="session")
def texts() -> tuple[np.ndarray, np.ndarray]:
    """ids and starts of LENGTHS texts; ids from 5 on, so that no padding id is among them."""
    generator = np.random.default_rng(7)
    ids = generator.integers(5, 120, sum(LENGTHS)).astype(np.int32)
    return ids, np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)


@pytest.fixture(scope="session")
def reference(texts: tuple[np.ndarray, np.ndarray]) -> Iterator[Callable[[str], list[np.ndarray]]]:
    """`reference(family)` → transformers' states [tokens, width] of every text, each computed alone."""
    import torch

    known: dict[str, list[np.ndarray]] = {}

    def answer(family: str) -> list[np.ndarray]:
        if family not in known:
            model, (ids, starts) = make_model(family), texts
            with torch.no_grad():
                known[family] = [
                    model(input_ids=torch.from_numpy(ids[a:b].astype(np.int64))[None]).last_hidden_state[0].numpy()
                    for a, b in pairwise(starts)
                ]
        return known[family]

    yield answer
