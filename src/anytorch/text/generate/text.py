"""From token ids to text, piece by piece: whole characters only, and nothing of a stop string. No torch.

A character may be spread over several tokens, and a tokenizer may look at the token before (a leading space). So the
last few tokens are always decoded together, and a piece is what that text has grown by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # tokens before a piece that are decoded with it: enough for leading spaces and for skipped special tokens
UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character, or not yet

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """`add(*tokens)` gives the text that is certain now; `rest()` what is left when there are no more tokens.

    `before`: the tokens the new ones go on after. All pieces together are the text of all tokens.
    """

    def __init__(self, decode: Decode, before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = clean_end(decode, before)
        self._clean = [0, len(self._ids)]  # places in `_ids` where no character is cut
        self._known = decode(self._ids) if self._ids else ""
        self._given = 0  # characters after `_known` that were given out

    def add(self, *tokens: int) -> str:
        self._ids += tokens
        text = self._new_text()
        certain = text.rstrip(UNFINISHED)
        piece = certain[self._given :]
        if len(certain) == len(text) and len(text) >= self._given:
            self._move()
        else:
            self._given += len(piece)
        return piece

    def rest(self) -> str:
        """What the tokens so far decode to beyond what was given out: marks for bytes that never became a character."""
        piece = self._new_text()[self._given :]
        self._given += len(piece)
        return piece

    def _new_text(self) -> str:
        return self._decode(self._ids)[len(self._known) :]

    def _move(self) -> None:
        """All of it was given out: forget tokens, but begin between two characters and keep some to decode with."""
        self._clean.append(len(self._ids))
        while len(self._clean) > 2 and len(self._ids) - self._clean[1] >= CONTEXT:
            self._clean.pop(0)
        first = self._clean[0]
        self._ids = self._ids[first:]
        self._clean = [place - first for place in self._clean]
        self._known, self._given = self._decode(self._ids), 0


def clean_end(decode: Decode, ids: Sequence[int]) -> list[int]:
    """The last tokens, beginning between two characters if that can be told."""
    for count in range(CONTEXT, 4 * CONTEXT):
        if count >= len(ids) or not decode(ids[-count:]).startswith(UNFINISHED):
            return list(ids[-count:])
    return list(ids[-CONTEXT:])


class StopStrings:
    """Cuts a text that comes in pieces before the first of several strings.

    `add(piece)` gives what can be shown: what may be the beginning of a stop string is held back until it is certain.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._held = ""
        self.found: str | None = None  # the one that ended the text

    @property
    def any(self) -> bool:
        return bool(self._strings)

    def add(self, piece: str) -> str:
        if not self._strings:
            return piece
        text = self._held + piece
        places = [(place, -len(string), string) for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            place, _, self.found = min(places)
            self._held = ""
            return text[:place]
        keep = max(beginning(text, string) for string in self._strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


def beginning(text: str, string: str) -> int:
    """How many characters at the end of the text are the beginning of the string (and not all of it)."""
    for count in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:count]):
            return count
    return 0
