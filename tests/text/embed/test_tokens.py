"""Texts to ids: as transformers does it, cut early only where that changes nothing, bad texts named."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError, ModelError, UsageError
from anytorch.text.embed.cutting import places
from anytorch.text.embed.recipe import read_recipe
from anytorch.text.embed.tokens import TextTokenizer

TEXTS = [
    "Hello, world!", "", " ", "naïve café ÄÖÜ", "日本語のテキスト", "emoji 👩‍👩‍👧 and\ttabs\nlines", "a" * 300,
    "[CLS] in the text [SEP]", "word " * 500, "\x00control\x07", "don't stop-motion 3.14 x_y",
]  # fmt: skip


@pytest.fixture
def tokenizer(model_folder: Path) -> TextTokenizer:
    recipe = read_recipe(model_folder)
    return TextTokenizer(recipe, recipe.max_length)


def rows(tokens: Any) -> list[list[int]]:
    return [tokens.ids[a:b].tolist() for a, b in zip(tokens.starts[:-1], tokens.starts[1:], strict=True)]


def test_same_ids_as_transformers(tokenizer: TextTokenizer, model_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(model_folder)
    expected = theirs(TEXTS, truncation=True, max_length=256)["input_ids"]
    tokens = tokenizer(TEXTS)
    assert rows(tokens) == expected
    assert tokens.ids.dtype == tokens.starts.dtype == np.int32 and tokens.truncated == 1
    assert rows(tokenizer(["world"], prompt="Hello, ")) == theirs(["Hello, world"])["input_ids"]


def test_no_texts(tokenizer: TextTokenizer) -> None:
    tokens = tokenizer([])
    assert tokens.ids.tolist() == [] and tokens.starts.tolist() == [0]


def test_ids_are_packed_without_a_list_of_all(tokenizer: TextTokenizer) -> None:
    """As lists, all ids take ten times the memory of the array, and a file has very many."""
    texts = [f"{number} " + "word " * 250 for number in range(200)]
    tokenizer(texts[:1])
    tracemalloc.start()
    try:
        tokens = tokenizer(texts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tokens.ids) > 50_000 and peak < 1.5 * tokens.ids.nbytes


@pytest.mark.parametrize("bad", [5, None, b"bytes", ("a", "pair"), ["list"], float("nan")])
def test_what_is_not_a_text_is_named(bad: object, tokenizer: TextTokenizer) -> None:
    with pytest.raises(InputError, match=rf"text 12 is {type(bad).__name__}, not str"):
        tokenizer(["fine", "fine", bad], first=10)  # type: ignore[list-item]


def test_a_lone_surrogate_is_named(tokenizer: TextTokenizer) -> None:
    with pytest.raises(InputError, match=r"text 1 holds a lone surrogate \(U\+D83D\) at character 3"):
        tokenizer(["fine", "bad\ud83d!"])


def test_the_tokenizer_can_be_built_from_a_vocabulary(tokenizer: TextTokenizer, copied_model: Path) -> None:
    (copied_model / "tokenizer.json").unlink()
    from_vocabulary = TextTokenizer(read_recipe(copied_model), 256)
    assert rows(from_vocabulary(TEXTS)) == rows(tokenizer(TEXTS))
    (copied_model / "vocab.txt").write_text("[UNK]\nhello\n")
    with pytest.raises(ModelError, match=r"vocab\.txt: has no \[CLS\]"):
        TextTokenizer(read_recipe(copied_model), 256)
    (copied_model / "vocab.txt").unlink()
    with pytest.raises(ModelError, match="found no tokenizer"):
        TextTokenizer(read_recipe(copied_model), 256)


def test_a_damaged_tokenizer_is_named(copied_model: Path) -> None:
    (copied_model / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        TextTokenizer(read_recipe(copied_model), 256)


@pytest.mark.parametrize(
    ("config", "vocabulary", "told"),
    [
        ("7", "[UNK]\n[CLS]\n[SEP]\na\n", r"tokenizer_config\.json: not an object"),
        ('{"strip_accents": 1}', "[UNK]\n[CLS]\n[SEP]\na\n", "its strip_accents is neither true nor false"),
        ("{}", "[CLS]\n[SEP]\na\n", r"vocab\.txt: has no \[UNK\]"),
        ('{"cls_token": "\\ud800"}', "[UNK]\n[CLS]\n[SEP]\na\n", "cannot be read as a vocabulary: .*surrogates"),
    ],
)
def test_damaged_files_of_a_vocabulary_are_named(config: str, vocabulary: str, told: str, copied_model: Path) -> None:
    recipe = read_recipe(copied_model)
    (copied_model / "tokenizer.json").unlink()
    (copied_model / "vocab.txt").write_text(vocabulary)
    (copied_model / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError, match=told):
        TextTokenizer(recipe, 256)


def test_a_word_without_a_token_is_our_error(copied_model: Path) -> None:
    path = copied_model / "tokenizer.json"
    layout = json.loads(path.read_text())
    layout["model"]["vocab"] = {"[CLS]": 0, "[SEP]": 1, "a": 2}
    layout["added_tokens"] = []
    path.write_text(json.dumps(layout))
    with pytest.raises(InputError, match="cannot be tokenized: WordPiece error"):
        TextTokenizer(read_recipe(copied_model), 256)(["unknown"])


def test_a_panic_of_the_library_is_our_error(copied_model: Path) -> None:
    """Its panics are no Exceptions: uncaught, one would end the thread that serves others."""
    path = copied_model / "tokenizer.json"
    layout = json.loads(path.read_text())
    first = layout["post_processor"]["single"][0]["SpecialToken"]
    first["id"] = "[NONE]"
    path.write_text(json.dumps(layout))
    with pytest.raises((InputError, ModelError), match="cannot be"):
        TextTokenizer(read_recipe(copied_model), 256)(["a text"])
    model = {
        "type": "BPE",
        "continuing_subword_prefix": "longer",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    }
    path.write_text(json.dumps({**layout, "post_processor": None, "added_tokens": [], "model": model}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read as a tokenizer: range end index"):
        TextTokenizer(read_recipe(copied_model), 256)


@pytest.mark.parametrize("odd", [[[]], [{"type": ["NFC"]}], {}, "NFC", [{"type": "Sequence", "normalizers": 3}]])
def test_components_that_only_rust_understands_are_not_cut_by(odd: Any) -> None:
    """Its reader takes lists and components without a type, too: then no place is certain, and nothing is cut."""
    layout = {
        "model": {"type": "BPE"},
        "pre_tokenizer": {"type": "ByteLevel"},
        "normalizer": {"type": "Sequence", "normalizers": odd},
    }
    assert places(layout) is None


def test_lower_case(copied_model: Path) -> None:
    path = copied_model / "tokenizer.json"
    layout = json.loads(path.read_text())
    layout["normalizer"]["lowercase"] = False
    path.write_text(json.dumps(layout))
    (copied_model / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    tokens = TextTokenizer(read_recipe(copied_model), 256)(["HELLO", "hello"])
    assert rows(tokens)[0] == rows(tokens)[1]


def test_max_length_must_leave_room(model_folder: Path) -> None:
    recipe = read_recipe(model_folder)
    with pytest.raises(UsageError, match="leaves no room for text"):
        TextTokenizer(recipe, 2)
    assert [len(row) for row in rows(TextTokenizer(recipe, 3)(["one two three"]))] == [3]


@pytest.mark.long
def test_the_compiled_twin_gives_the_same(
    tokenizer: TextTokenizer, model_folder: Path, missing: Any, long_texts: list[str]
) -> None:
    recipe = read_recipe(model_folder)
    twin = TextTokenizer(recipe, recipe.max_length)
    if not twin.hurry():
        missing("compiler", "the compiled tokenizer needs one")
    assert (tokenizer.kind, twin.kind) == ("Rust", "compiled WordPiece")
    for texts in (TEXTS, long_texts, ["日本" * 5000, "中文，" * 3000 + "x"], []):
        ours, theirs = twin(texts), tokenizer(texts)
        assert rows(ours) == rows(theirs) and ours.truncated == theirs.truncated
    assert rows(twin(["world"], prompt="Hello, ")) == rows(tokenizer(["Hello, world"]))
    for bad in (5, None, ("a", "b"), "a\ud800"):
        with pytest.raises(InputError, match="text 11"):
            twin(["fine", bad], first=10)  # type: ignore[list-item]
