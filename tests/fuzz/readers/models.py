"""Model folders: safetensors headers, indexes, configurations, recipes, tokenizers, packed weights."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from anytorch import quant
from anytorch.errors import ModelError, UsageError
from anytorch.forecast import checkpoints
from anytorch.forecast.model import pretrained
from anytorch.forecast.model.model import Kronos
from anytorch.forecast.model.tokenizer import KronosTokenizer
from anytorch.lite import saving
from anytorch.quant import container
from anytorch.quant.tensor import unpack
from anytorch.safetensors_files import check_layers, checkpoint_files, locate_tensors, read_header, stored_tensor
from anytorch.serve.loaders import job_of
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.embed.recipe import Recipe, read_recipe
from anytorch.text.embed.tokens import TextTokenizer
from anytorch.text.generate import loading
from tests.fuzz.kit import scratch, target

ONLY = (ModelError,)


@target("safetensors", "tensors", errors=ONLY)
def safetensors(data: bytes) -> None:
    """Whatever a header lets pass can be read, by torch and by NumPy, and lies within the file."""
    path = scratch.file("model.safetensors", data)
    tensors, metadata = read_header(path)
    assert all(isinstance(value, str) for value in metadata.values())
    with Checkpoint(path.parent) as checkpoint:
        assert set(checkpoint.names()) == set(tensors)
        for name, stored in tensors.items():
            assert 0 <= stored.data_start <= stored.offset <= stored.offset + stored.nbytes <= len(data)
            for read in (stored_tensor, lambda stored: checkpoint.tensor(stored.name)):
                try:
                    value = read(stored)
                except ModelError:
                    continue  # a dtype that one of them does not have
                assert tuple(value.shape) == stored.shape, name
    saving.load(path)


@target("shards", "folder", errors=ONLY)
def shards(data: bytes) -> None:
    """An index names files beside it, or is refused."""
    folder = scratch.folder(data, ("model.safetensors.index.json", "a.safetensors", "b.safetensors"))
    for path in checkpoint_files(folder):
        assert path.parent == folder
    locate_tensors(folder)


RECIPE_FILES = (
    "config.json", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json",
    "1_Pooling/config.json", "2_Dense/config.json", "tokenizer.json", "vocab.txt",
)  # fmt: skip


@target("recipe", "folder", errors=ONLY)
def recipe(data: bytes) -> None:
    """A model folder's description is a recipe whose numbers are within range, or refused."""
    made = read_recipe(scratch.folder(data, RECIPE_FILES))
    assert 1 <= made.max_length <= made.spec.max_positions < 2**31
    assert made.spec.heads * made.spec.head_width < 2**31 and math.isfinite(made.spec.eps)
    assert all(isinstance(text, str) for pair in made.prompts.items() for text in pair)


@cache
def small_recipe() -> Recipe:
    config = {
        "model_type": "bert",
        "vocab_size": 100,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 32,
    }
    return read_recipe(scratch.folder(json.dumps(config).encode(), RECIPE_FILES))


TEXTS = ["", "a", "Hello, World! naïve", "word " * 300, "日本" * 200]


@target("tokenizer", "folder", errors=(ModelError, UsageError), longest=8192)
def tokenizer(data: bytes) -> None:
    """A tokenizer's files are a tokenizer that gives at most max_length ids for each text, or are refused."""
    plain = small_recipe()
    folder = scratch.folder(data, ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
    recipe = Recipe(folder, folder, plain.spec, plain.pooling, (), 32, lower_case=len(data) % 2 == 1)
    tokens = TextTokenizer(recipe, 32)(TEXTS, longest=10_000)
    assert len(tokens.starts) == len(TEXTS) + 1 and tokens.starts[-1] == len(tokens.ids)
    assert np.all(tokens.lengths >= 1) and np.all(tokens.lengths <= 32)


@target("language_model", "folder", errors=ONLY)
def language_model(data: bytes) -> None:
    """A language model's configuration has sizes that can be computed with, or is refused."""
    folder = scratch.folder(data, ("config.json",))
    config = loading.read_config(folder)
    check_layers(config, 100, "config.json")  # the loader counts the tensors
    loading.check_numbers(config, folder / "config.json")
    assert loading.cache_nbytes(config, 2048, 2) >= 0


@target("kronos", "folder", errors=(ModelError, UsageError))
def kronos(data: bytes) -> None:
    """A Kronos configuration is one that its constructor takes, or is refused; so is what a folder was trained with."""
    folder = scratch.folder(data, ("config.json", checkpoints.FILE))
    cls: Any = KronosTokenizer if b"n_enc_layers" in data else Kronos
    found = checkpoints.read_trained_with(folder)
    assert found is None or isinstance(found.tokenizer, str)
    config = pretrained.read_config(folder / "config.json", cls, {})
    assert set(config) == set(pretrained.arguments_of(cls))


@target("job", "folder", errors=())
def job(data: bytes) -> None:
    """What a folder is for is found out without an error, whatever lies in it."""
    assert job_of(scratch.folder(data, ("config.json", "modules.json"))) in (None, "forecast", "text", "embeddings")


def small_model() -> nn.Module:
    with torch.device("cpu"):
        return nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4, bias=False))


@target("packed_weights", "tensors", errors=ONLY)
def packed_weights(data: bytes) -> None:
    """A file of packed weights is read, each of them and as a whole model, or is refused."""
    path = scratch.file("model.safetensors", data)
    reader = container.Reader(path, verify=len(data) % 2 == 0)  # without sums, too: then the parts alone must fit
    for name in reader.plain:
        reader.get(name)
    for name in reader.packed:
        weight = reader.get_packed(name)
        if math.prod(weight.shape) < 2**20:
            assert tuple(unpack(weight).shape) == weight.shape
    made = quant.load(small_model(), path, verify=False)
    assert not any(value.is_meta for value in made.state_dict().values())
