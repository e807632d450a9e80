"""Cutting long texts before they are tokenized: leave out what truncation would drop, and change no token.

A model reads the first few hundred tokens of a text, and a tokenizer takes seconds and gigabytes for all of it. So a long
text is cut at a place where its left part gives the same tokens whatever follows. Which places are such depends on the
tokenizer: `places` finds them in its description, and what is not known to be one is none. Whether a cut left enough is seen
afterwards: a text of which truncation then drops nothing was cut too short, and is cut again (`TextTokenizer`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

SHORT = 8  # characters for each token the model can take: a shorter text is not cut
WINDOW = 16  # characters for each token: where the first cut is looked for; the next window is four times as large
LOOK = 65_536  # characters at the end of a window that are looked at: looking holds up other threads

# A space or line break with an ASCII letter or digit on both sides.
BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z0-9])[ \n](?=[A-Za-z0-9])")
SPACE_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z0-9])[ ](?=[A-Za-z0-9])")
LOCAL_NORMALIZERS = {
    "BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Precompiled", "Prepend", "Strip", "Nmt",
}  # fmt: skip
NEAR_SIGHTED = {"Digits", "Punctuation"}
SPLITTING = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
# Qwen's own split; ByteLevel's is GPT-2's. Neither has a piece that reaches over a space from letter to letter.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Characters for regular expressions. All letters here are letters to every tokenizer, begin no cluster with what follows
# them (as the signs before Arabic numbers do), and normalise by themselves unless a mark follows.
IDEOGRAPHS = "\u4e00-\u9fff"
EAST_ASIAN = IDEOGRAPHS + "\u3041-\u3096\u30a1-\u30fa"
LETTERS = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03f5\u03f7-\u03ff\u0400-\u0481\u048a-\u052f\u05d0-\u05ea"
    "\u0620-\u063a\u0641-\u064a\u0904-\u0939\u0e01-\u0e30\uac00-\ud7a3" + EAST_ASIAN
)
EAST_ASIAN_SIGNS = "，。！？；：、"
# Without < = > (a stroke that follows makes another sign of them) and _ (which is a letter to some).
ASCII_SIGNS = "!\"#$%&'()*+,-./:;?@[\\]^`{|}~"


def words_are_independent(layout: Mapping[str, Any]) -> bool:
    """True if cutting a text at a space between words certainly leaves the tokens before the cut unchanged.

    True when the normalizer works character by character there, the pre-tokenizer splits there, and no added token holds a
    space. Anything not known to be so is tokenized whole. A pure function of tokenizer.json.
    """
    if any(re.search(r"\s", content) for content in _added(layout)):
        return False
    if (layout.get("model") or {}).get("type") not in ("WordPiece", "BPE", "Unigram"):
        return False
    local = all(_is_local(part) for part in parts(layout.get("normalizer"), "normalizers"))
    # Once split, later parts see single words; those before it must not look further than a character.
    split = (
        part for part in parts(layout.get("pre_tokenizer"), "pretokenizers") if part.get("type") not in NEAR_SIGHTED
    )
    return local and _splits(next(split, {}))


class Places(NamedTuple):
    """Where texts may be cut: at `words`, which are found fastest, and at all the places that `every` finds."""

    words: re.Pattern[str]
    every: re.Pattern[str]


def places(layout: Mapping[str, Any], normalize: Callable[[str], str] = str) -> Places | None:
    """Where a text may be cut without a change to the tokens on the left of it; None: nowhere that is certain.

    `normalize` is the tokenizer's own normalizer, which is asked what it makes of a line break.
    """
    if not words_are_independent(layout):
        return None
    added = _added(layout)
    normalizers = parts(layout.get("normalizer"), "normalizers")
    splitting = [part for part in parts(layout.get("pre_tokenizer"), "pretokenizers") if _splits(part)]
    kinds = {str(part.get("type")) for part in splitting}
    words_alone = any(token.get("single_word") for token in layout.get("added_tokens") or [])
    signs = re.escape("".join(sign for sign in ASCII_SIGNS if not any(sign in content for content in added)))
    asian = not any(re.search(f"[{EAST_ASIAN}{EAST_ASIAN_SIGNS}]", content) for content in added)
    breaks = kinds != {"Metaspace"} or "\n" not in normalize("a\nb")  # Metaspace itself splits at spaces alone
    # A word, or signs, before a space; Qwen's signs take line breaks along.
    found = [f"(?<=[{LETTERS}])(?=[ {chr(10) if breaks else ''}])"]
    if before := signs + (EAST_ASIAN_SIGNS if asian else ""):
        found.append(f"(?<=[{before}])(?=[ {chr(10) if breaks and 'Split' not in kinds else ''}])")
    if kinds <= {"BertPreTokenizer", "Whitespace", "ByteLevel", "Split"}:  # these end a word before a sign
        if signs:
            found.append(f"(?<=[A-Za-z0-9])(?=[{signs}])")
        if asian:
            found.append(f"(?<=[{EAST_ASIAN}])(?=[{EAST_ASIAN_SIGNS}])")
    if (
        kinds <= {"ByteLevel", "Split"}
        and not words_alone
        and not any(re.search("[A-Za-z][0-9]", one) for one in added)
    ):
        found.append("(?<=[A-Za-z])(?=[0-9])")  # "qwen3" are two words to these
    if kinds == {"BertPreTokenizer"} and signs:
        found.append(f"(?<=[{signs}])(?=[{signs}])")
    if kinds <= SPLITTING and asian and any(_sets_ideographs_apart(part) for part in normalizers):
        found.append(f"(?<=[{IDEOGRAPHS}])(?=[{IDEOGRAPHS}])")
    return Places(BETWEEN_WORDS if breaks else SPACE_BETWEEN_WORDS, re.compile("|".join(found)))


def cut(text: str, most: int, where: Places | None, window: int = WINDOW) -> str:
    """The beginning of a text that has more than `most` tokens as far as can be told; the text itself, if nothing can.

    `where` is from `places`. Looks at the first `window` × `most` characters, and then at four times as many, and so on.

    >>> len(cut("word " * 10_000, 256, places({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}})))
    1284
    """
    if len(text) <= SHORT * most or where is None:
        return text
    if window == WINDOW:
        # One more word than there may be tokens, so that the tokenizer itself still notices the truncation.
        for pattern in where:
            last = next(islice(pattern.finditer(text, 0, window * most), most, None), None)
            if last is not None:
                return text[: last.start()]
    while (end := window * most) < len(text):
        # Fewer words, perhaps of more tokens each: the last place in the window.
        found = deque(where.every.finditer(text, max(0, end - LOOK), end), maxlen=1)
        if found:
            return text[: found[0].start()]
        window *= 4
    return text


def parts(component: Any, name: str) -> list[Mapping[str, Any]]:
    """What a normalizer or pre-tokenizer does, one after the other; those of a Sequence have this name in it.

    {} stands for one that is not written as ours are: the Rust reader also takes components without a type.
    """
    if component is None:
        return []
    if not isinstance(component, Mapping) or not isinstance(component.get("type"), str):
        return [{}]
    if component["type"] == "Sequence":
        within = component.get(name)
        return [part for inner in (within if isinstance(within, list) else [{}]) for part in parts(inner, name)]
    return [component]


def _added(layout: Mapping[str, Any]) -> Sequence[str]:
    return [str(token.get("content", "")) for token in layout.get("added_tokens") or []]


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") == "Replace":  # runs of spaces become one: a single space stays
        return normalizer.get("pattern") == {"Regex": " {2,}"} and normalizer.get("content") in (" ", "▁")
    return normalizer.get("type") in LOCAL_NORMALIZERS


def _sets_ideographs_apart(normalizer: Mapping[str, Any]) -> bool:
    return normalizer.get("type") == "BertNormalizer" and normalizer.get("handle_chinese_chars") is True


def _splits(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer.get("type")
    if kind == "ByteLevel":
        return pre_tokenizer.get("use_regex", True) is True
    if kind == "Metaspace":
        return pre_tokenizer.get("split", True) is True
    if kind == "Split":
        return pre_tokenizer.get("pattern") == {"Regex": QWEN_SPLIT} and not pre_tokenizer.get("invert")
    return kind in SPLITTING
