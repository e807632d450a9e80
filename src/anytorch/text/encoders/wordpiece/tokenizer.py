"""A WordPiece tokenizer compiled from a Hugging Face one, with the same answers.

A GPU encodes short texts faster than the Rust tokenizer makes tokens, even with all cores. Its rules for characters
(lower case, accents, signs, spaces) are not written down again here: the Rust tokenizer is asked, character by character,
and the answers are the table that `wordpiece.cpp` reads. What the table leaves out (scripts beyond U+24FF, added tokens
within a text) is given to the Rust tokenizer text by text, so that every text has the reference's ids.
"""

from __future__ import annotations

import ctypes
import json
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anytorch import logs, native
from anytorch.errors import NativeUnavailable
from anytorch.text.checkpoints.checkpoint import Ints
from anytorch.text.packed.encoder import available_cores

if TYPE_CHECKING:
    import numpy.typing as npt

log = logs.logger(__name__)

SOURCE = Path(__file__).with_name("wordpiece.cpp")
CODES = 0x2500  # Latin, Greek, Cyrillic, Hebrew, Arabic, Indic scripts, punctuation, currency, arrows, mathematics
UNKNOWN, LETTERS, GAP, SIGN, NOTHING = range(5)
DONE, TRUNCATED, LEFT = range(3)
MOST_THREADS = 8  # a GPU is kept busy by fewer; the others are for whoever sends the batches
LONGEST_CHARACTER = 13  # bytes one character may become
LARGEST = 2**31 - 1
MOST_NODES = 2**24  # of the table of pieces, one for each byte at most; a character is up to 4
TRICKY = (
    "", " ", "Hello, World!", "naïve Ångström café", "don't stop-me now... (really?)", "a\tb\nc\rd\x0be\x00", "x" * 101,
    "x" * 100, "ǅ İstanbul ß ﬁ", "“curly” — dashes… €5 ½ ²", "ΑΣ Привет שלום", "e\u0301le\u0300ve", "[MASK] [CLS]",
    "unaffable supercalifragilisticexpialidocious", "3.14159e-10 $100,000.00", "a\u00adb\u200bc\ufeffd", "日本語 text",
    "#hash ##ed `code` ~ ^ | \\ {} <>", "word " * 300, "\u0130\u0131\u1e9e\u0345",
)  # fmt: skip


class WordPiece:
    """`encode(texts, most)` → ids, starts, flags; texts flagged LEFT have no ids and are for the reference.

    Thread-safe; the GIL is free while it works, on `threads` threads of its own. `compile_wordpiece` makes it.
    """

    def __init__(self, library: ctypes.CDLL, handle: int) -> None:
        self._library, self._handle = library, handle
        self.threads = max(1, min(MOST_THREADS, available_cores() // 2))

    def encode(self, texts: Sequence[str], most: int) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
        """Packed ids of all texts, at most `most` for each, special ones included.

        Texts are left to the reference where `most` has no room for the special ones, and where a word is over 2,048 bytes.
        Raises UnicodeEncodeError for a lone surrogate, TypeError for what is no str, MemoryError.
        """
        most = max(0, min(most, LARGEST))
        held = list(texts)  # the bytes belong to the texts, which must stay while this works without the GIL
        count = len(held)
        begins, sizes = np.empty(count, np.uintp), np.empty(count, np.int64)
        _gather(held, begins, sizes)
        ids = np.empty(self._library.wordpiece_room(self._handle, sizes.ctypes.data, count, most), np.int32)
        starts = np.empty(count + 1, np.int32)
        flags = np.empty(count, np.uint8)
        total = self._library.wordpiece_encode(
            self._handle, begins.ctypes.data, sizes.ctypes.data, count, most, self.threads, ids.ctypes.data,
            starts.ctypes.data, flags.ctypes.data,
        )  # fmt: skip
        if total < 0:
            raise MemoryError(f"out of memory while tokenizing {count} texts")
        return ids[:total], starts, flags

    def encode_all(
        self, encode: Callable[[list[str]], Sequence[Any]], texts: Sequence[str], most: int
    ) -> tuple[Ints, Ints, int]:
        """ids, starts and how many texts were cut at `most` tokens. `encode`, the reference, does what this leaves.

        `encode` must truncate at `most` itself, as `tokenizers.Tokenizer.encode_batch` does after `enable_truncation(most)`.
        """
        ids, starts, flags = self.encode(texts, most)
        truncated = int(np.count_nonzero(flags == TRUNCATED))
        left = np.flatnonzero(flags == LEFT)
        if not len(left):
            return ids, starts, truncated
        encodings = encode([texts[i] for i in left.tolist()])
        truncated += sum(1 for encoding in encodings if encoding.overflowing)
        rows = np.split(ids, starts[1:-1])
        for i, encoding in zip(left.tolist(), encodings, strict=True):
            rows[i] = np.array(encoding.ids, np.int32)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum([len(row) for row in rows], out=starts[1:])
        return np.concatenate(rows), starts, truncated

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            self._library.wordpiece_delete(handle)


def _gather(texts: list[str], begins: npt.NDArray[np.uintp], sizes: npt.NDArray[np.int64]) -> None:
    """Address and size of each text's UTF-8. The one call here that holds the GIL: it reads Python objects."""
    with_gil, item, utf8 = _python()
    with_gil.wordpiece_gather(texts, len(texts), item, utf8, begins.ctypes.data, sizes.ctypes.data)


def compile_wordpiece(reference: Any) -> WordPiece | None:
    """The compiled twin of a `tokenizers.Tokenizer`; None where it is not BERT's kind, or there is no C++ compiler.

    The twin is compared with the reference on texts chosen to tell them apart before it is given out.
    """
    layout = json.loads(reference.to_str())
    why = unsuitable(layout)
    if why:
        log.debug("texts are tokenized by the Rust tokenizer: %s", why)
        return None
    try:
        made = _compile(reference, layout)
    except NativeUnavailable as exc:
        log.info("texts are tokenized by the Rust tokenizer: %s", exc.message)
        return None
    differing = first_difference(made, reference)
    if differing is not None:
        log.warning("the compiled tokenizer differs from the Rust one for %r and is not used", differing)
        return None
    return made


def unsuitable(layout: dict[str, Any]) -> str:
    """Why a tokenizer.json is not one whose words and characters stand for themselves; "" when it is. Pure."""
    model = layout.get("model") or {}
    kinds = ((layout.get("pre_tokenizer") or {}).get("type"), (layout.get("normalizer") or {}).get("type"))
    if model.get("type") != "WordPiece":
        return f"its model is {model.get('type')}, not WordPiece"
    if kinds != ("BertPreTokenizer", "BertNormalizer"):
        return f"it splits and normalises by {kinds}"
    if not layout.get("post_processor"):
        return "it adds no tokens of its own, so that an empty text would have none"
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or str(model.get("unk_token") or "[UNK]") not in vocabulary:
        return "its vocabulary has no token for unknown words"
    if any(not 0 <= number <= LARGEST for number in vocabulary.values()):
        return "it has ids beyond 31 bits"
    if 2 * sum(map(len, vocabulary)) > MOST_NODES // 4:
        return "its vocabulary is too large for the table"
    for token in layout.get("added_tokens") or []:
        if token.get("normalized") or token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            return f"its added token {token.get('content')!r} has its own matching rules"
        if not token.get("content"):
            return "it has an empty added token"
    return ""


def first_difference(made: WordPiece, reference: Any, texts: Sequence[str] = TRICKY) -> str | None:
    """The first of the texts for which the two disagree; None when they agree on all."""
    plain = _untruncated(reference)
    for text in texts:
        ids, _, flags = made.encode([text], 1 << 20)
        if flags[0] != LEFT and ids.tolist() != plain.encode(text).ids:
            return text
    return None


def _untruncated(reference: Any) -> Any:
    """The same tokenizer without the truncation and padding it may have been given."""
    copy = type(reference).from_str(reference.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _compile(reference: Any, layout: dict[str, Any]) -> WordPiece:
    library = _library()
    model = layout["model"]
    prefix = str(model.get("continuing_subword_prefix") or "##")
    vocabulary: dict[str, int] = model["vocab"]
    entries = [(piece.encode(), 0, number) for piece, number in vocabulary.items()]
    entries += [
        (piece[len(prefix) :].encode(), 1, number)
        for piece, number in vocabulary.items()
        if piece.startswith(prefix) and len(piece) > len(prefix)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece, _, _ in entries])]).astype(np.int64)
    roots = np.array([root for _, root, _ in entries], np.uint8)
    numbers = np.array([number for _, _, number in entries], np.int32)
    table = character_table(reference)
    plain = _untruncated(reference)
    whole, bare = plain.encode("a").ids, plain.encode("a", add_special_tokens=False).ids
    at = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    before, after = np.array(whole[:at], np.int32), np.array(whole[at + len(bare) :], np.int32)
    longest = min(int(model.get("max_input_chars_per_word") or 100), LARGEST)
    added = b"".join(str(token["content"]).encode() + b"\0" for token in layout.get("added_tokens") or [])
    handle = library.wordpiece_new(
        b"".join(piece for piece, _, _ in entries), offsets.ctypes.data, roots.ctypes.data, numbers.ctypes.data,
        len(entries), table.ctypes.data, CODES, added, len(added), before.ctypes.data, len(before), after.ctypes.data,
        len(after), vocabulary[str(model.get("unk_token") or "[UNK]")], longest,
    )  # fmt: skip
    if not handle:
        raise MemoryError(f"out of memory for a tokenizer of {len(entries)} pieces")
    return WordPiece(library, handle)


def character_table(reference: Any) -> npt.NDArray[np.void]:
    """What each character below CODES becomes, by asking the reference's normalizer and pre-tokenizer."""
    kind_of = np.dtype([("kind", "u1"), ("length", "u1"), ("count", "u1"), ("bytes", f"S{LONGEST_CHARACTER}")])
    table = np.zeros(CODES, kind_of)
    normalize, split = reference.normalizer.normalize_str, reference.pre_tokenizer.pre_tokenize_str
    for code in range(1, CODES):
        character = chr(code)
        made = normalize(character)
        if made == "":
            table[code] = (NOTHING, 0, 0, b"")
            continue
        if unicodedata.combining(character):
            continue  # it may change places with its neighbours: not for a table
        pieces = [piece for piece, _ in split(f"a{made}a")]
        encoded = made.encode()
        if len(encoded) > LONGEST_CHARACTER:
            continue
        if pieces == [f"a{made}a"]:
            table[code] = (LETTERS, len(encoded), len(made), encoded)
        elif pieces == ["a", "a"]:
            table[code] = (GAP, 0, 0, b"")
        elif pieces == ["a", made, "a"] and len(made) == 1:
            table[code] = (SIGN, len(encoded), 1, encoded)
    return table


@lru_cache(maxsize=1)
def _python() -> tuple[ctypes.PyDLL, int | None, int | None]:
    """The library as one whose calls keep the GIL and raise what Python's own functions raise, and those functions."""
    with_gil = ctypes.PyDLL(None, handle=_library()._handle)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    with_gil.wordpiece_gather.argtypes = [ctypes.py_object, number, pointer, pointer, pointer, pointer]
    with_gil.wordpiece_gather.restype = number
    item, utf8 = ctypes.pythonapi.PyList_GetItem, ctypes.pythonapi.PyUnicode_AsUTF8AndSize
    return with_gil, ctypes.cast(item, pointer).value, ctypes.cast(utf8, pointer).value


def _library() -> ctypes.CDLL:
    library = native.load("wordpiece", [SOURCE])
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.wordpiece_new.argtypes = [
        ctypes.c_char_p, pointer, pointer, pointer, number, pointer, number, ctypes.c_char_p, number, pointer, number,
        pointer, number, ctypes.c_int32, number,
    ]  # fmt: skip
    library.wordpiece_new.restype = pointer
    library.wordpiece_delete.argtypes = [pointer]
    library.wordpiece_delete.restype = None
    library.wordpiece_room.argtypes = [pointer, pointer, number, number]
    library.wordpiece_room.restype = number
    library.wordpiece_encode.argtypes = [
        pointer, pointer, pointer, number, number, number, pointer, pointer, pointer,
    ]  # fmt: skip
    library.wordpiece_encode.restype = number
    library.wordpiece_character_nbytes.restype = number
    assert library.wordpiece_character_nbytes() == 16
    return library
