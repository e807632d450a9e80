"""Texts to ids: as transformers does it, cut early only where that changes nothing, bad texts named."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError, ModelError, UsageError
from anytorch.text.embed.recipe import read_recipe
from anytorch.text.embed.tokens import BETWEEN_WORDS, QWEN_SPLIT, TextTokenizer, words_are_independent

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


# --- cutting before tokenizing ----------------------------------------------------------------------------------------


def long_texts() -> list[str]:
    plain = ["alpha", "x", "42", "Berlin", "o", "stop"]
    strange = ["naïve", "…", "日本", "[SEP]", "a\u0301", "\u0308", "don't", "\x07", "——", "Straße", "👩‍👩‍👧", "##ing"]
    words = [*plain * 4, *strange]
    generator = random.Random(3)
    gaps = [*[" "] * 9, "  ", "\n", "\n\n", "\t", "\u00a0", "-", ""]
    return [
        "".join(generator.choice(words) + generator.choice(gaps) for _ in range(generator.randrange(400, 2500)))
        for _ in range(60)
    ]


def test_cutting_changes_nothing(tokenizer: TextTokenizer) -> None:
    texts = long_texts()
    cut = [tokenizer.cut(text) for text in texts]
    assert sum(len(a) < len(b) for a, b in zip(cut, texts, strict=True)) > 20, "nothing was cut: the test tests nothing"
    whole = tokenizer._tokenizer.encode_batch(texts)
    tokens = tokenizer(texts)
    assert rows(tokens) == [encoding.ids for encoding in whole]
    assert tokens.truncated == sum(bool(encoding.overflowing) for encoding in whole)


def test_cutting_changes_nothing_for_byte_level_and_unigram(tmp_path: Path, model_folder: Path) -> None:
    """Tokenizers of the other kinds, trained here; each must be one that `words_are_independent` admits."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    texts = long_texts()
    kinds: dict[str, tuple[Any, Any, Any, Any]] = {
        "bytes": (
            models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=False),
            trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        ),
        "qwen": (
            models.BPE(), normalizers.NFC(),
            pre_tokenizers.Sequence([
                pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)
            ]),
            trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
        ),
        "unigram": (
            models.Unigram(), normalizers.NFKC(),
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
            trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]),
        ),
    }  # fmt: skip
    for name, (model, normalizer, pre_tokenizer, trainer) in kinds.items():
        made = Tokenizer(model)
        made.normalizer = normalizer
        made.pre_tokenizer = pre_tokenizer
        made.train_from_iterator(texts[:20], trainer)
        folder = tmp_path / name
        shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer.json"))
        made.save(str(folder / "tokenizer.json"))
        ours = TextTokenizer(read_recipe(folder), 64)
        assert ours._may_cut, name
        assert sum(len(ours.cut(text)) < len(text) for text in texts) > 20
        assert rows(ours(texts)) == [encoding.ids or [0] for encoding in ours._tokenizer.encode_batch(texts)], name
        assert rows(ours([""])) == [[0]], "an empty text without special tokens is one token of padding"
        assert rows(ours(["", "alpha", ""])) == [[0], *rows(ours(["alpha"])), [0]], name


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "split": False}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".*"}}},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "Unheard"}]}},
        {"added_tokens": [{"content": "new york"}]},
        {"model": {"type": "WordLevel"}},
    ],
)
def test_what_is_not_certain_is_tokenized_whole(change: dict[str, Any]) -> None:
    certain = {
        "added_tokens": [{"content": "[CLS]"}],
        "normalizer": {"type": "BertNormalizer"},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece"},
    }
    assert words_are_independent(certain)
    assert not words_are_independent({**certain, **change})


def test_a_text_without_spaces_is_left_alone(tokenizer: TextTokenizer) -> None:
    assert tokenizer.cut("日本" * 5000) == "日本" * 5000
    assert len(BETWEEN_WORDS.findall("a b  c\nd - e")) == 2


def test_the_compiled_twin_gives_the_same(tokenizer: TextTokenizer, model_folder: Path, missing: Any) -> None:
    recipe = read_recipe(model_folder)
    twin = TextTokenizer(recipe, recipe.max_length)
    if not twin.hurry():
        missing("compiler", "the compiled tokenizer needs one")
    assert (tokenizer.kind, twin.kind) == ("Rust", "compiled WordPiece")
    for texts in (TEXTS, long_texts(), []):
        ours, theirs = twin(texts), tokenizer(texts)
        assert rows(ours) == rows(theirs) and ours.truncated == theirs.truncated
    assert rows(twin(["world"], prompt="Hello, ")) == rows(tokenizer(["Hello, world"]))
    for bad in (5, None, ("a", "b"), "a\ud800"):
        with pytest.raises(InputError, match="text 11"):
            twin(["fine", bad], first=10)  # type: ignore[list-item]
