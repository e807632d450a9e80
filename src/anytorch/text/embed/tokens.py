"""Turn texts into packed token ids with Hugging Face's Rust tokenizers; very long texts are cut first (`cutting`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from anytorch.errors import AnytorchError, InputError, ModelError, UsageError
from anytorch.text.checkpoints.checkpoint import Ints
from anytorch.text.embed.cutting import SHORT, WINDOW, cut, parts, places
from anytorch.text.embed.recipe import Recipe, read_json


class Tokens(NamedTuple):
    """Texts as the encoders take them (`protocol`): text i is ids[starts[i]:starts[i + 1]]."""

    ids: Ints  # [total]
    starts: Ints  # [texts + 1]
    truncated: int  # texts that were longer than the model's max_length

    @property
    def lengths(self) -> Ints:
        return self.starts[1:] - self.starts[:-1]

    def part(self, begin: int, end: int, truncated: int = 0) -> Tokens:
        """The texts [begin, end)."""
        starts = self.starts[begin : end + 1]
        return Tokens(self.ids[starts[0] : starts[-1]], starts - starts[0], truncated)

    @staticmethod
    def joined(parts: Sequence[Tokens]) -> Tokens:
        """The texts of all parts, one after the other."""
        lengths = np.concatenate([part.lengths for part in parts])
        return Tokens(
            np.concatenate([part.ids for part in parts]), starts_of(lengths), sum(part.truncated for part in parts)
        )


def starts_of(lengths: npt.ArrayLike) -> Ints:
    """Where texts of these lengths start when they lie end to end, and where the last one ends."""
    starts = np.zeros(np.size(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


class TextTokenizer:
    """The tokenizer of one model with its max_length. Thread-safe; releases the GIL while it works."""

    def __init__(self, recipe: Recipe, max_length: int) -> None:
        self.max_length = max_length
        self._pad_id = recipe.spec.pad_id
        self._tokenizer, layout = load_tokenizer(recipe)
        special = self._tokenizer.num_special_tokens_to_add(False)
        if max_length <= special:
            raise UsageError(
                f"max_length={max_length} leaves no room for text: the model adds {special} tokens of its own",
                hint=f"the model's own limit is {recipe.max_length}",
            )
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_length=max_length)
        self._encode: Callable[..., Any] = getattr(
            self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch
        )  # without offsets, which nobody here reads
        normalizer = self._tokenizer.normalizer
        self._places = places(layout, str if normalizer is None else normalizer.normalize_str)
        self._twin: Any = None

    def hurry(self) -> bool:
        """Use a compiled twin where the model's tokenizer has one: for encoders that are faster than the Rust one.

        It gives the same ids (it is compared with the Rust tokenizer when it is made). Takes a tenth of a second.
        """
        from anytorch.text.encoders.wordpiece.tokenizer import compile_wordpiece

        self._twin = compile_wordpiece(self._tokenizer)
        return self._twin is not None

    @property
    def parallel(self) -> bool:
        """True if one call uses several cores by itself and hardly holds the GIL."""
        return self._twin is not None

    @property
    def kind(self) -> str:
        return "compiled WordPiece" if self._twin is not None else "Rust"

    def __call__(self, texts: Sequence[str], *, prompt: str = "", first: int = 0, longest: int | None = None) -> Tokens:
        """Tokenize a list of texts. `first` is the number of the first one, for messages.

        Raises InputError for what is not a text, and for one of which more than `longest` characters must be tokenized.
        """
        # The Rust tokenizer would take a pair for two sentences; the compiled one says itself what is no str.
        if self._twin is None and not all(isinstance(text, str) for text in texts):
            check_texts(texts, first)
        try:
            whole = [prompt + text for text in texts] if prompt else texts
            if self._twin is not None:
                encode = partial(self._encodings, longest=longest)
                return Tokens(*self._twin.encode_all(encode, whole, self.max_length))
            encodings = self._encodings(whole, longest)
        except InputError:
            raise
        except (TypeError, ValueError) as exc:  # a UnicodeEncodeError is a ValueError
            check_texts(texts, first)
            raise InputError(f"the texts cannot be tokenized: {exc}") from exc
        lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
        rows: Iterable[list[int]] = (
            encoding.ids for encoding in encodings
        )  # one at a time: a list of all would be large
        if len(lengths) and lengths.min() == 0:  # a tokenizer without special tokens, and an empty text
            lengths = np.maximum(lengths, 1)
            rows = (encoding.ids or [self._pad_id] for encoding in encodings)
        starts = starts_of(lengths)
        full = np.flatnonzero(np.diff(starts) >= self.max_length)
        truncated = sum(1 for i in full if encodings[i].overflowing)
        return Tokens(np.fromiter(chain.from_iterable(rows), np.int32, int(starts[-1])), starts, truncated)

    def cut(self, text: str) -> str:
        """Leave out what truncation would drop anyway, before the work of tokenizing it."""
        return cut(text, self.max_length, self._places)

    def _encodings(self, texts: Sequence[str], longest: int | None) -> list[Any]:
        """The texts as the Rust tokenizer has them, of each no more than the model can use as far as that can be told."""
        if max(map(len, texts), default=0) <= SHORT * self.max_length:
            return self._encode_all(texts, longest)
        short = [cut(text, self.max_length, self._places) for text in texts]
        encodings = self._encode_all(short, longest)
        left = [place for place, text in enumerate(texts) if short[place] is not text]
        window = WINDOW
        while left := [place for place in left if not encodings[place].overflowing]:  # too little: nothing was dropped
            window *= 4
            more = [cut(texts[place], self.max_length, self._places, window) for place in left]
            for place, encoding in zip(left, self._encode_all(more, longest), strict=True):
                encodings[place] = encoding
            left = [place for place, text in zip(left, more, strict=True) if text is not texts[place]]
        return encodings

    def _encode_all(self, texts: Sequence[str], longest: int | None) -> list[Any]:
        if longest is not None and (most := max(map(len, texts), default=0)) > longest:
            raise InputError(
                f"a text is too long: nowhere in {most} characters can it be cut; the limit is {longest}",
                hint=f"send its beginning: the model reads no more than {self.max_length} tokens",
            )
        # A word that has no token, in a vocabulary without one for unknown words; a token around texts that is not there.
        with of_rust(lambda why: InputError(f"the texts cannot be tokenized: {why}", hint="the tokenizer is damaged")):
            found: list[Any] = self._encode(list(texts))
        return found


def check_iterable(texts: Any) -> None:
    if isinstance(texts, (bytes, bytearray)) or not hasattr(texts, "__iter__"):
        raise InputError(
            f"texts must be a str or an iterable of str, not {type(texts).__name__}",
            hint='engine.encode("one text") or engine.encode(["one", "two"])',
        )


def check_texts(texts: Sequence[object], first: int = 0) -> None:
    """Raise InputError that names the first item which is not a text."""
    for index, text in enumerate(texts, first):
        if not isinstance(text, str):
            shown = repr(text)
            raise InputError(
                f"text {index} is {type(text).__name__}, not str: {shown[:60]}{'…' if len(shown) > 60 else ''}",
                hint="texts are str; for a missing one use an empty str, for a file of them `anytorch embed FILE`",
            )
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InputError(
                f"text {index} holds a lone surrogate (U+{ord(text[exc.start]):04X}) at character {exc.start}, which is not "
                "a character by itself",
                hint='decode the text with its own encoding, or text.encode("utf-8", "replace").decode() to replace it',
            ) from exc


@contextmanager
def of_rust(told: Callable[[str], AnytorchError], also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """A context that makes errors of ours of what the Rust library raises, and of kinds that are named `also`.

    It raises plain Exceptions; and where it panics, what is no Exception, and would end a thread that catches those.
    """
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, also) or type(exc) is Exception or type(exc).__name__ == "PanicException":
            raise told(str(exc)) from exc
        raise


def load_tokenizer(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """The folder's Rust tokenizer and its description. A BERT folder without tokenizer.json has vocab.txt."""
    try:
        import tokenizers
    except ModuleNotFoundError as exc:
        raise ModelError("texts need the package tokenizers", hint="pip install 'anytorch[embed]'") from exc
    folder = recipe.encoder
    path = folder / "tokenizer.json"
    if path.is_file():
        with of_rust(
            lambda why: ModelError(f"{path}: cannot be read as a tokenizer: {why}", hint="fetch it again"), (Exception,)
        ):
            text = path.read_text(encoding="utf-8")
            tokenizer = tokenizers.Tokenizer.from_str(text)
        layout = _layout(text)
    elif (folder / "vocab.txt").is_file() and recipe.spec.family in ("bert", "distilbert"):
        tokenizer = _word_pieces(folder)
        layout = json.loads(tokenizer.to_str())
    else:
        raise ModelError(
            f"{folder}: found no tokenizer: neither tokenizer.json nor, for BERT, vocab.txt",
            hint="fetch tokenizer.json; transformers' AutoTokenizer.from_pretrained(…).save_pretrained(folder) writes it",
        )
    normalizing = parts(layout.get("normalizer"), "normalizers")
    if recipe.lower_case and not any(one.get("type") == "Lowercase" or one.get("lowercase") for one in normalizing):
        from tokenizers import normalizers

        mine = [normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence(mine + ([tokenizer.normalizer] if tokenizer.normalizer else []))
    return tokenizer, layout


def _layout(text: str) -> dict[str, Any]:
    """tokenizer.json without its vocabulary, which is most of it and takes longer to read than all the rest."""
    match = re.search(r',\s*"model"\s*:\s*\{\s*"type"\s*:\s*"(\w+)"', text)
    if match is not None:
        try:
            layout: dict[str, Any] = json.loads(text[: match.start()] + f', "model": {{"type": "{match[1]}"}}}}')
        except ValueError:  # it was not the last entry
            pass
        else:
            return layout
    whole: dict[str, Any] = json.loads(text)
    return whole


def _word_pieces(folder: Path) -> Any:
    """BERT's tokenizer from vocab.txt, as transformers' BertTokenizer builds it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    accents = config.get("strip_accents") if isinstance(config, dict) else ""
    if accents is not None and not isinstance(accents, bool):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: not an object, or its strip_accents is neither true nor false",
            hint="the file is damaged: fetch it again",
        )
    names = {name: str(config.get(f"{name}_token") or f"[{name.upper()}]") for name in ("unk", "cls", "sep", "pad")}
    with of_rust(
        lambda why: ModelError(f"{folder / 'vocab.txt'}: cannot be read as a vocabulary: {why}"), (Exception,)
    ):
        tokenizer = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=names["unk"]))
        found = {name: tokenizer.token_to_id(names[name]) for name in ("unk", "cls", "sep")}
    for name, number in found.items():
        if number is None:
            raise ModelError(f"{folder / 'vocab.txt'}: has no {names[name]}", hint="it is not a BERT vocabulary")
    tokenizer.add_special_tokens([names[name] for name in names if tokenizer.token_to_id(names[name]) is not None])
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=accents,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{names['cls']} $A {names['sep']}",
        special_tokens=[(names["cls"], found["cls"]), (names["sep"], found["sep"])],
    )
    return tokenizer


def pack_ids(rows: Sequence[Sequence[int]], *, vocabulary: int, max_length: int) -> Tokens:
    """Token ids of one text per row, as the model's own tokenizer gives them (its special tokens included).

    Raises InputError for an id the model does not have, an empty row, and one longer than `max_length`: cutting it would
    lose the token that ends a text.

    >>> pack_ids([[101, 102]], vocabulary=30522, max_length=256).starts.tolist()
    [0, 2]
    """
    lengths = [len(row) for row in rows]
    for number, length in enumerate(lengths):
        if not 1 <= length <= max_length:
            raise InputError(
                f"text {number} has {length} token ids; the model takes 1 to {max_length}",
                hint="cut the ids into pieces, each with the special tokens the tokenizer adds",
            )
    starts = starts_of(lengths)
    flat = [number for row in rows for number in row]
    for place, number in enumerate(flat):
        if type(number) is not int or not 0 <= number < vocabulary:
            text = int(np.searchsorted(starts, place, side="right")) - 1
            raise InputError(
                f"text {text} has the token id {str(number)[:40]}; the model's ids go from 0 to {vocabulary - 1}",
                hint="use the model's own tokenizer, or send texts",
            )
    return Tokens(np.array(flat, np.int32), starts, 0)
