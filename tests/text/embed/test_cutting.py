"""Long texts are cut before they are tokenized, and no token changes: at every place, for every kind of tokenizer."""

from __future__ import annotations

import json
import random
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.errors import InputError
from anytorch.text.embed.cutting import BETWEEN_WORDS, LETTERS, QWEN_SPLIT, Places, cut, places, words_are_independent
from anytorch.text.embed.recipe import read_recipe
from anytorch.text.embed.tokens import TextTokenizer

KINDS = (
    "bert",
    "bert-cased",
    "mixed",
    "bytes",
    "bytes-digits",
    "qwen",
    "unigram",
    "unigram-lines",
    "spaces",
    "plain-words",
)
# What a cut could change: words, marks that join what stands before them, gaps of all kinds, signs alone and in runs,
# scripts without spaces, contractions, numbers, and the tokens that are added to a vocabulary, whole and in part.
PIECES = [
    *("a", "Wort", "naïve", "e\u0301", "x1", "42", "3.14", "don't", "we'll", "a_b"),
    *("+", "/", "==", "=\u0338", "...", "!?", "-", "\u0308", "\u0338", "\u200d", "\ufe0f", "\x07"),
    *(" ", " ", " ", " ", "  ", "\n", "\n", "\n\n", " \n ", "\t", "\r\n", "\u00a0", "\u3000"),
    *("中", "国家", "日本語", "か\u3099", "カタカナ", "，", "。", "、", "！？", "한국어"),
    *("Привет", "ΣΑΣ", "שלום", "مرحبا", "\u0600", "हिन्दी", "ไทย", "İ", "ß", "ﬁ", "Ⅷ", "½", "👩‍👩‍👧", "🇩🇪"),
    *("[MASK]", "[MAS", "K]", "<mask>", "<ma", "sk>", "qwen3", "tok", "##ing"),
]


def texts_of(seed: int, count: int, pieces: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices(PIECES, k=pieces)) for _ in range(count)]


def make(kind: str, model_folder: Path) -> Any:
    """A tokenizer of this kind, trained here on texts of these pieces."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    if kind == "bert":
        return Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["[UNK]", "[MASK]"]
    bpe = trainers.BpeTrainer(vocab_size=500, show_progress=False, initial_alphabet=alphabet, special_tokens=special)
    word_piece = trainers.WordPieceTrainer(vocab_size=600, show_progress=False, special_tokens=special)
    unigram = trainers.UnigramTrainer(vocab_size=400, show_progress=False, unk_token="[UNK]", special_tokens=special)
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    parts: dict[str, tuple[Any, Any, Any, Any]] = {
        "bert-cased": (
            models.WordPiece(unk_token="[UNK]"), normalizers.BertNormalizer(lowercase=False, strip_accents=False),
            pre_tokenizers.BertPreTokenizer(), word_piece,
        ),
        "mixed": (
            models.WordPiece(unk_token="[UNK]"), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
            pre_tokenizers.Whitespace(), word_piece,
        ),
        "bytes": (models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=True), bpe),
        "bytes-digits": (
            models.BPE(), normalizers.NFC(),
            pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]), bpe,
        ),
        "qwen": (
            models.BPE(), normalizers.NFC(),
            pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]), bpe,
        ),
        "unigram": (
            models.Unigram(),
            normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
            pre_tokenizers.Metaspace(), unigram,
        ),
        "unigram-lines": (
            models.Unigram(), normalizers.NFKC(),
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), unigram,
        ),
        "spaces": (models.Unigram(), normalizers.NFKC(), pre_tokenizers.Metaspace(), unigram),  # a line break joins words
        "plain-words": (
            models.WordPiece(unk_token="[UNK]"), normalizers.BertNormalizer(), pre_tokenizers.WhitespaceSplit(), word_piece
        ),
    }  # fmt: skip
    model, normalizer, pre_tokenizer, trainer = parts[kind]
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizer
    made.train_from_iterator(texts_of(1, 100, 60), trainer)
    if kind in ("bytes", "unigram"):
        made.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    if kind in ("mixed", "qwen"):
        made.add_tokens([AddedToken("tok", single_word=True, normalized=True), AddedToken("qwen3")])
    return made


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    return {}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, kinds: dict[str, Any], model_folder: Path) -> Any:
    if request.param not in kinds:
        kinds[request.param] = make(request.param, model_folder)
        kinds[request.param].no_truncation()
        kinds[request.param].no_padding()
    return kinds[request.param]


def where_of(tokenizer: Any) -> Places:
    normalizer = tokenizer.normalizer
    found = places(json.loads(tokenizer.to_str()), str if normalizer is None else normalizer.normalize_str)
    assert found is not None, "one of the kinds that are cut"
    return found


def test_every_place_leaves_the_tokens_before_it(tokenizer: Any) -> None:
    """The promise itself, at every place of texts that are made to break it."""
    where = where_of(tokenizer)
    cuts = 0
    for text in texts_of(2, 150, 40):
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        for one in (*where.every.finditer(text), *where.words.finditer(text)):
            left = tokenizer.encode(text[: one.start()], add_special_tokens=False).ids
            assert left == whole[: len(left)], (text[max(0, one.start() - 20) : one.start()], text[one.start() :][:20])
            cuts += 1
    assert cuts > 200


def in_folder(tokenizer: Any, folder: Path, model_folder: Path, most: int) -> TextTokenizer:
    shutil.copytree(model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "tokenizer.json"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return TextTokenizer(read_recipe(folder), most)


def rows(tokens: Any) -> list[list[int]]:
    return [
        row.tolist() for row in (tokens.ids[a:b] for a, b in zip(tokens.starts[:-1], tokens.starts[1:], strict=True))
    ]


def test_cutting_changes_nothing(tokenizer: Any, long_texts: list[str], tmp_path: Path, model_folder: Path) -> None:
    ours = in_folder(tokenizer, tmp_path / "model", model_folder, 64)
    texts = [
        *long_texts,
        *texts_of(3, 20, 900),
        "",
        "alpha",
        "中" * 3000 + "。 a",
        "x" * 3000 + " y",
        " " * 3000 + "z",
        "\u0301" * 2000,
    ]
    assert sum(len(ours.cut(text)) < len(text) for text in texts) > 40, "nothing was cut: the test tests nothing"
    whole = ours._tokenizer.encode_batch(texts)
    tokens = ours(texts)
    assert rows(tokens) == [encoding.ids or [0] for encoding in whole]
    assert tokens.truncated == sum(bool(encoding.overflowing) for encoding in whole)
    prompted = ours(texts[:5], prompt="query: ")
    assert rows(prompted) == [one.ids for one in ours._tokenizer.encode_batch(["query: " + text for text in texts[:5]])]


LONG: dict[str, Callable[[int], str]] = {
    "chinese": lambda count: "中文" * (count // 2),
    "chinese sentences": lambda count: "今天天气很好，我们去公园。" * (count // 13),
    "chinese lines": lambda count: ("今天天气很好。" * 20 + "\n") * (count // 141),
    "japanese": lambda count: "カタカナとひらがな、漢字。" * (count // 13),
    "english": lambda count: "word " * (count // 5),
    "russian": lambda count: "слово " * (count // 6),
    "base64": lambda count: "aGVsbG8gd29ybGQ/IQ+1" * (count // 20),
    "signs": lambda count: "!" * count,
    "one word": lambda count: "a" * count,
}
# Without a space nothing ends a word for these; of one word of millions of letters nothing is known before its end.
SPACED = {"english", "russian", "chinese lines"}
WHOLE = {
    *((kind, "one word") for kind in KINDS),
    *((kind, text) for kind in ("unigram", "unigram-lines", "spaces") for text in LONG.keys() - SPACED),
    *((kind, text) for kind in ("mixed", "bytes", "bytes-digits", "qwen") for text in ("chinese", "signs")),
    *(("plain-words", text) for text in ("base64", "signs")),
    ("spaces", "chinese lines"),
}  # fmt: skip


@pytest.mark.parametrize("text", LONG)
def test_what_is_tokenized_of_a_long_text_is_bounded(tokenizer: Any, text: str, request: pytest.FixtureRequest) -> None:
    whole = LONG[text](2_000_000)
    left = cut(whole, 256, where_of(tokenizer))
    kind = request.node.callspec.params["tokenizer"]
    assert (left is whole) == ((kind, text) in WHOLE), len(left)
    assert left is whole or len(left) <= 16 * 256


def test_what_cannot_be_cut_has_a_limit(model_folder: Path, long_texts: list[str]) -> None:
    recipe = read_recipe(model_folder)
    ours = TextTokenizer(recipe, recipe.max_length)
    with pytest.raises(InputError, match="5000 characters"):
        ours(["fine", "a" * 5000], longest=4999)
    with pytest.raises(InputError, match="too long"):  # it can be cut, but no cut leaves tokens enough
        ours(["b " + "a" * 100_000], longest=50_000)
    assert rows(ours(long_texts, longest=5000)) == rows(ours(long_texts))


def test_the_letters_are_what_they_are_taken_for() -> None:
    for code in map(ord, re.findall(f"[{LETTERS}]", "".join(map(chr, range(0x10000))))):
        character = chr(code)
        if character.isascii():
            continue
        assert unicodedata.category(character)[0] == "L", hex(code)
        assert unicodedata.combining(character) == 0, hex(code)
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            assert unicodedata.normalize(form, character + " ") == unicodedata.normalize(form, character) + " ", hex(
                code
            )


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Metaspace", "split": False}},
        {"pre_tokenizer": {"type": "ByteLevel", "use_regex": False}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ".*"}}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "Whitespace"}]}},
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
    assert words_are_independent(certain) and places(certain) is not None
    assert not words_are_independent({**certain, **change}) and places({**certain, **change}) is None
    assert len(BETWEEN_WORDS.findall("a b  c\nd - e")) == 2
