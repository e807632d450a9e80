"""Pieces of text: whole characters, leading spaces, stop strings at every boundary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from anytorch.text.generate.text import Detokenizer, StopStrings, beginning

TEXT = "naïve café 日本語 🙂👩‍🚀 text"


class Bytes:
    """A tokenizer whose tokens are bytes: the worst case for characters."""

    @staticmethod
    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")


def pieces(decode: Any, ids: list[int], before: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(decode, before or [])
    return [*(detokenizer.add(token) for token in ids), detokenizer.rest()]


def test_a_character_comes_whole_or_not_at_all() -> None:
    found = pieces(Bytes.decode, list(TEXT.encode()))
    assert "".join(found) == TEXT
    assert not any("\ufffd" in piece for piece in found)
    assert found.count("") == len(TEXT.encode()) - len(TEXT) + 1


def test_bytes_that_never_become_a_character_are_told_at_the_end() -> None:
    assert "".join(pieces(Bytes.decode, list("é".encode()[:1]))) == "\ufffd"
    assert "".join(pieces(Bytes.decode, [0xFF, 0xFF, 65])) == "\ufffd\ufffdA"


@given(st.binary(max_size=40), st.binary(max_size=20))
@settings(max_examples=300, deadline=None)
def test_pieces_of_any_bytes_are_the_text_of_all_of_them(data: bytes, before: bytes) -> None:
    prompt = before.decode(errors="ignore").encode()  # a prompt is a text: its characters are whole
    assert "".join(pieces(Bytes.decode, list(data), list(prompt))) == data.decode(errors="replace")


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_sentencepiece_tokenizer_with_byte_fallback(text: str) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "e": 5, "t": 6}
    words |= {f"<0x{byte:02X}>": 10 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(words, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    ids = tokenizer.encode("ab " + text).ids
    before = tokenizer.encode("ab").ids
    ids = ids[len(before) :]
    # The text goes on after the prompt, so a space at its beginning is part of it.
    assert "".join(pieces(tokenizer.decode, ids, before)) == tokenizer.decode(before + ids)[2:]


def test_the_tokenizer_of_the_tests(models: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["llama"])
    ids = tokenizer(TEXT + " unknown ✨ words").input_ids
    assert "".join(pieces(tokenizer.decode, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stop_string_is_found_over_any_boundary(size: int) -> None:
    text = "one STO two STOP three"
    stops = StopStrings(["STOP", "three"])
    shown = "".join(stops.add(text[n : n + size]) for n in range(0, len(text), size) if stops.found is None)
    assert (shown, stops.found) == ("one STO two ", "STOP")


def test_what_might_begin_a_stop_string_is_held_and_then_shown() -> None:
    stops = StopStrings(["\n\n", "###"])
    assert [stops.add(piece) for piece in ("a\n", "b", "#", "#", "c#")] == ["a", "\nb", "", "", "##c"]
    assert stops.rest() == "#"
    assert stops.found is None


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_strings_in_pieces_are_those_of_the_whole_text(text: str, strings: list[str]) -> None:
    stops = StopStrings(strings)
    shown = ""
    for character in text:
        shown += stops.add(character)
        if stops.found is not None:
            break
    else:
        shown += stops.rest()
    # The one that is complete first ends the text.
    ends = [(text.index(s) + len(s), -len(s)) for s in strings if s in text]
    assert shown == (text[: min(ends)[0] + min(ends)[1]] if ends else text)


def test_beginning() -> None:
    assert beginning("abab", "abc") == 2
    assert beginning("abc", "abc") == 0
    assert beginning("", "abc") == 0
