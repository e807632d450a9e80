"""Prompt lookup: guess that a text goes on as it did where the same tokens stood before, and read the guess in one go.

Weights are read once for all guessed tokens, as for one. What the model itself would have chosen decides: the right
beginning of a guess is kept, with one more token that follows from it, and the rest is forgotten. So the tokens are the
same as one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anytorch.errors import UsageError, did_you_mean
from anytorch.text.decoders.rows import Rows, most_likely
from anytorch.values import dataclass

METHODS = ("promptlookup", "prompt_lookup")
NAMES = ("method", "ngram_size", "spec_length")
LONGEST = 64


@dataclass(frozen=True)
class Lookup:
    """`ngram_size` tokens (or fewer, down to two) that stood there before; `spec_length` tokens are guessed."""

    ngram_size: int = 3
    spec_length: int = 5

    @staticmethod
    def of(given: Any) -> Lookup | None:
        """From what `spec_decode_config` may be: None, a method's name, a mapping, or an object with these attributes.
        Raises UsageError."""
        if given is None or isinstance(given, Lookup):
            return given
        if isinstance(given, str):
            given = {"method": given}
        if isinstance(given, Mapping) and (unknown := [name for name in given if name not in NAMES]):
            raise UsageError(
                f"spec_decode_config: {unknown[0]!r} is unknown; known are {', '.join(NAMES)}",
                hint=did_you_mean(str(unknown[0]), NAMES),
            )
        if not isinstance(given, Mapping) and not any(hasattr(given, name) for name in NAMES):
            raise UsageError(
                f"spec_decode_config is of type {type(given).__name__}",
                hint=f'pass {{"method": {METHODS[0]!r}, "ngram_size": 3, "spec_length": 5}}, or leave it out',
            )
        read = given.get if isinstance(given, Mapping) else lambda name, otherwise: getattr(given, name, otherwise)
        method = read("method", METHODS[0])
        if method not in METHODS:
            raise UsageError(f"spec_decode_config: method {method!r} is unknown; use {METHODS[0]!r}")
        sizes = {"ngram_size": read("ngram_size", 3), "spec_length": read("spec_length", 5)}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LONGEST:
                raise UsageError(
                    f"spec_decode_config: {name}={size!r} is invalid: use a whole number from 1 to {LONGEST}"
                )
        return Lookup(**sizes)


class History:
    """A text so far, and where each of its short sequences of tokens stood last."""

    def __init__(self, lookup: Lookup, ids: Sequence[int]) -> None:
        self._lookup = lookup
        self._sizes = range(lookup.ngram_size, min(2, lookup.ngram_size) - 1, -1)
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # where a text went on that had these tokens
        self.add(ids)

    def add(self, ids: Sequence[int]) -> None:
        for token in ids:
            # What ends with the token before is known to have gone on only now.
            for size in self._sizes:
                if len(self._ids) >= size:
                    self._after[tuple(self._ids[-size:])] = len(self._ids)
            self._ids.append(token)

    def guess(self) -> list[int]:
        """What may follow: nothing where the last tokens are new."""
        for size in self._sizes:
            place = self._after.get(tuple(self._ids[-size:]))
            if place is not None:
                return self._ids[place : place + self._lookup.spec_length]
        return []


def generate(
    rows: Rows, ids: Sequence[int], tokens: int, ends: Collection[int], lookup: Lookup
) -> tuple[list[int], dict[str, int]]:
    """The most likely tokens after a prompt, as `Rows.generate` gives them, and counts: of readings, of tokens that were
    guessed, and of those that were right."""
    made: list[int] = []
    counts = {"readings": 0, "guessed": 0, "right": 0}
    history = History(lookup, ids)
    try:
        if rows.stopping:
            return made, counts
        (token,) = most_likely(rows.read(0, ids)[None], [0])
        while tokens > len(made) and token not in ends:
            made.append(token)
            history.add([token])
            room = min(tokens - len(made), rows.positions - rows.lengths[0])
            if room < 1 or rows.stopping:
                break
            guess = history.guess()[: room - 1]
            logits = rows.read(0, [token, *guess], onward=True, every=True)
            best = most_likely(logits, range(len(guess) + 1))
            right = 0
            while right < len(guess) and guess[right] == best[right] and guess[right] not in ends:
                right += 1
            made += guess[:right]
            history.add(guess[:right])
            rows.cut(0, rows.lengths[0] - (len(guess) - right))
            token = best[right]
            counts["readings"] += 1
            counts["guessed"] += len(guess)
            counts["right"] += right
    finally:
        rows.stop(False)
    return made, counts
