"""The compiled tokenizer gives the Rust tokenizer's ids, or says that it does not know."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytorch.errors import NativeUnavailable

tokenizers = pytest.importorskip("tokenizers")

from anytorch.text.encoders.wordpiece.tokenizer import (  # noqa: E402
    LEFT,
    TRICKY,
    WordPiece,
    compile_wordpiece,
    first_difference,
    unsuitable,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = [
    "the",
    "un",
    "aff",
    "able",
    "nai",
    "naive",
    "cafe",
    "hello",
    "world",
    "do",
    "don",
    "ing",
    "é",
    "ß",
    "привет",
    "日",
]
ADDED = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def build(lowercase: bool = True, signs: str = ".,!?'-#[]()$€“”…") -> Any:
    """A BERT tokenizer with a small vocabulary: letters, so that most words have pieces, but no q: those are unknown."""
    letters = [letter for letter in LETTERS if letter != "q"]
    pieces = [*ADDED, *letters, *(f"##{x}" for x in letters), *WORDS, *(f"##{word}" for word in WORDS), *signs]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=20))
    made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(ADDED)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    return made


@pytest.fixture(scope="module", params=[True, False], ids=["uncased", "cased"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, missing: Callable[[str, str], NoReturn]
) -> Iterator[tuple[Any, WordPiece]]:
    from anytorch import native
    from anytorch.text.encoders.wordpiece.tokenizer import SOURCE

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path_factory.mktemp("native")))
        try:
            native.build("wordpiece", [SOURCE])
        except NativeUnavailable as exc:
            missing("compiler", str(exc))
        reference = build(lowercase=request.param)
        made = compile_wordpiece(reference)
        assert made is not None
        yield reference, made


def check(reference: Any, made: WordPiece, texts: list[str], most: int = 1 << 20) -> np.ndarray:
    """Compare; the flags of the texts."""
    ids, starts, flags = made.encode(texts, most)
    reference.enable_truncation(most)
    for i, encoding in enumerate(reference.encode_batch(texts)):
        if flags[i] != LEFT:
            assert ids[starts[i] : starts[i + 1]].tolist() == encoding.ids, texts[i]
            assert bool(flags[i]) == bool(encoding.overflowing), texts[i]
        else:
            assert starts[i] == starts[i + 1]
    return flags


def test_same_ids(pair: tuple[Any, WordPiece]) -> None:
    flags = check(*pair, [*TRICKY, "unaffable naïve QUEUE don't", "caf\u00e9", "cafe\u0301"])
    assert (flags != LEFT).mean() > 0.6, "nearly all of these are ours to do"


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_same_ids_for_any_text(pair: tuple[Any, WordPiece], data: st.DataObject) -> None:
    alphabet = st.one_of(
        st.sampled_from(" \t\n.,[]#'aeiouqÉß\u0301\u00ad“日"), st.characters(codec="utf-8", max_codepoint=0x2600)
    )
    words = st.one_of(st.text(alphabet, max_size=12), st.sampled_from([*ADDED, *WORDS, "[MASK", "x" * 21, "x" * 20]))
    texts = data.draw(st.lists(st.lists(words, max_size=12).map(" ".join), max_size=8))
    check(*pair, texts, data.draw(st.sampled_from([3, 4, 9, 1 << 20])))


def test_what_is_left_to_the_reference(pair: tuple[Any, WordPiece]) -> None:
    reference, made = pair
    assert check(reference, made, ["plain", "a [MASK] b", "日本", "😀", "zero\0inside", "[MASKED"]).tolist() == [
        0, LEFT, LEFT, LEFT, LEFT, 0,
    ]  # fmt: skip


def test_truncation_completes_the_word_first(pair: tuple[Any, WordPiece]) -> None:
    """A word that becomes unknown only by its last letter is unknown in a truncated text, too."""
    check(*pair, ["hello " + "a" * 15 + "q", "hello " + "a" * 15], most=6)


@pytest.mark.parametrize("most", [-(10**30), -1, 0, 1, 2, 3, 10**30])
def test_any_limit_stays_within_its_memory(pair: tuple[Any, WordPiece], most: int) -> None:
    """Two special tokens did not fit in a limit of one, and were written behind the memory for one."""
    texts = ["", "the", "hello world", "unaffable " * 50, "日"] * 40
    ids, starts, flags = pair[1].encode(texts, most)
    lengths = np.diff(starts)
    assert len(ids) == starts[-1] and (lengths <= max(most, 0)).all()
    assert (flags == LEFT).all() if most < 2 else (flags != LEFT).sum() == 160


def test_words_of_any_length(pair: tuple[Any, WordPiece]) -> None:
    """With a large max_input_chars_per_word, a word longer than our buffer lost the tokens beyond it."""
    layout = json.loads(pair[0].to_str())
    layout["model"]["max_input_chars_per_word"] = 100_000
    reference = tokenizers.Tokenizer.from_str(json.dumps(layout))
    made = compile_wordpiece(reference)
    assert made is not None
    long = ["hello" * 409, "hello" * 410, "é" * 1030, "привет" * 175]
    flags = check(reference, made, [*long, *(f"the {word} hello" for word in long)])
    assert (flags == LEFT).any() and (flags != LEFT).any()
    layout["model"]["max_input_chars_per_word"] = 2**63 - 1
    assert compile_wordpiece(tokenizers.Tokenizer.from_str(json.dumps(layout))) is not None


def test_vocabularies_the_table_cannot_hold(pair: tuple[Any, WordPiece]) -> None:
    layout = json.loads(pair[0].to_str())
    assert not unsuitable(layout)
    vocabulary = layout["model"]["vocab"]
    layout["model"]["vocab"] = {**vocabulary, "x": 2**31}
    assert "31 bits" in unsuitable(layout)
    layout["model"]["vocab"] = {"a": 0}
    assert "unknown words" in unsuitable(layout)
    layout["model"]["vocab"] = {**vocabulary, "x" * 2**22: 7}
    assert "too large" in unsuitable(layout)


def test_encode_all_merges_in_order(pair: tuple[Any, WordPiece]) -> None:
    reference, made = pair
    texts = ["[MASK] first", "hello world", "日 in between", "unaffable " * 9, "[SEP] " * 9, ""]
    reference.enable_truncation(8)
    ids, starts, truncated = made.encode_all(reference.encode_batch, texts, 8)
    wanted = reference.encode_batch(texts)
    assert [ids[a:b].tolist() for a, b in pairwise(starts)] == [e.ids for e in wanted]
    assert truncated == sum(bool(e.overflowing) for e in wanted) == 3
    assert ids.dtype == starts.dtype == np.int32


def test_no_texts_and_lone_surrogates(pair: tuple[Any, WordPiece]) -> None:
    ids, starts, flags = pair[1].encode([], 8)
    assert len(ids) == len(flags) == 0 and starts.tolist() == [0]
    with pytest.raises(UnicodeEncodeError):
        pair[1].encode(["\ud800"], 8)


def test_other_tokenizers_are_not_taken_for_bert() -> None:
    layout = json.loads(build().to_str())
    assert unsuitable(layout) == ""
    assert "BPE" in unsuitable({**layout, "model": {"type": "BPE"}})
    assert "ByteLevel" in unsuitable({**layout, "pre_tokenizer": {"type": "ByteLevel"}})
    assert "adds no tokens" in unsuitable({**layout, "post_processor": None})
    odd = [{"content": "<x>", "normalized": True}]
    assert "<x>" in unsuitable({**layout, "added_tokens": odd})
    assert compile_wordpiece(tokenizers.Tokenizer(tokenizers.models.BPE())) is None


def test_a_twin_that_differs_is_found_out(pair: tuple[Any, WordPiece]) -> None:
    """The check that guards the user: compared with another tokenizer, the first text that differs is named."""
    reference, made = pair
    assert first_difference(made, reference) is None
    other = build(lowercase=reference.normalizer.lowercase, signs=".,!?-#[]()$")
    assert first_difference(made, other, ["hello", "don't"]) in ("hello", "don't")


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_CXX", "no-such-compiler")
    assert compile_wordpiece(build()) is None


def test_without_memory_there_is_an_error_and_not_the_end(pair: tuple[Any, WordPiece]) -> None:
    library = pair[1]._library
    none = np.zeros(1, np.int64).ctypes.data
    made = library.wordpiece_new(b"", none, none, none, 0, none, 1 << 60, b"", 0, none, 0, none, 0, 0, 100)
    assert made is None, "a table that no machine has room for"
    short = WordPiece(SimpleNamespace(wordpiece_room=lambda *_: 4, wordpiece_encode=lambda *_: -1), 0)  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match="2 texts"):
        short.encode(["one", "two"], 8)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_change_nothing(pair: tuple[Any, WordPiece], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More texts than one thread is given, of lengths that share unevenly."""
    reference, made = pair
    texts = [" ".join(["hello world", "naïve"][number % 2] for number in range(n % 61)) for n in range(400)] * 3
    monkeypatch.setattr(made, "threads", threads)
    reference.enable_truncation(32)
    ids, starts, truncated = made.encode_all(reference.encode_batch, texts, 32)
    wanted = reference.encode_batch(texts)
    assert [ids[a:b].tolist() for a, b in pairwise(starts)] == [encoding.ids for encoding in wanted]
    assert truncated == sum(1 for encoding in wanted if encoding.overflowing) > 0
