"""Texts in rows that go on independently of one another: what all ways to decode have in common.

kernel.read(0, [1, 15, 7])             # a prompt; its logits say what follows
kernel.follow(0, token)                # what follows was chosen
logits = kernel.step()                 # of every row's last token
kernel.cut(0)                          # the text is over
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from anytorch.errors import InputError
from anytorch.text.decoders.model import Decoder, KeyValues


class Rows(ABC):
    """`rows` texts of up to `positions` tokens each. Not for several threads at once; `stop` may be called from another."""

    decoder: Decoder
    rows: int
    positions: int
    kept: KeyValues
    whole_prompts = False  # True: a prompt is read in one go
    lengths: list[int]  # tokens of each row whose keys and values are kept, or will be after the next step
    _stopping: ctypes.c_int32  # not 0: the generation under way ends, or the next one

    @property
    def vocabulary(self) -> int:
        return self.decoder.spec.vocabulary

    # --- what each way does its own way -----------------------------------------------------------------------------

    @abstractmethod
    def step(self) -> Tensor:
        """Logits of the tokens that `follow` put there, [rows, vocabulary]. They are overwritten by the next step.

        There may be fewer rows in it, but all that have a text."""

    @abstractmethod
    def _put(self, row: int, token: int, place: int) -> None:
        """The next step computes this token at this place."""

    @abstractmethod
    def _wait(self, row: int) -> None:
        """The next step leaves the row's keys and values as they are."""

    # --- texts -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, row: int, ids: Sequence[int], *, onward: bool = False, every: bool = False) -> Tensor:
        """Begin a row anew with a prompt, or go `onward` with it; gives the logits of its last token, [vocabulary], or of
        `every` token, [tokens, vocabulary].

        Raises InputError."""
        self._check(row)
        begin = self.lengths[row] if onward else 0
        if not ids or begin + len(ids) > self.positions:
            raise InputError(f"a prompt of {begin + len(ids)} tokens: there is room for 1 to {self.positions}")
        bad = [token for token in ids if not 0 <= token < self.vocabulary]
        if bad:
            raise InputError(f"token {bad[0]} is invalid: ids go from 0 to {self.vocabulary - 1}")
        logits = self._read(row, ids, begin, every)
        self.lengths[row] = begin + len(ids)
        self._wait(row)
        return logits.float()

    def _read(self, row: int, ids: Sequence[int], begin: int, every: bool) -> Tensor:
        """The logits of `read`; keys and values of the tokens from place `begin` on are kept."""
        kept = self.kept.of_row(row, begin)
        return self.decoder([list(ids)], kept)[0] if every else self.decoder.read(ids, kept)

    def follow(self, row: int, token: int) -> None:
        """Put a token after a row's last one; the next step computes it. Raises InputError."""
        self._check(row)
        if self.lengths[row] >= self.positions:
            raise InputError(f"row {row} is full: it has {self.positions} tokens")
        if not 0 <= token < self.vocabulary:
            raise InputError(f"token {token} is invalid: ids go from 0 to {self.vocabulary - 1}")
        self._put(row, token, self.lengths[row])
        self.lengths[row] += 1

    def cut(self, row: int, length: int = 0) -> None:
        """Forget a row's tokens after the first `length`, also one that no step has computed yet."""
        self._check(row)
        self.lengths[row] = min(self.lengths[row], length)
        self._wait(row)

    @torch.no_grad()
    def take(self, row: int, other: Rows, source: int) -> None:
        """Go on in this row with a text that another row has, of these or of another kernel for the same decoder."""
        self._check(row)
        length = other.lengths[source]
        if length > self.positions:
            raise InputError(f"a text of {length} tokens: there is room for {self.positions}")
        for mine, theirs in ((self.kept.keys, other.kept.keys), (self.kept.values, other.kept.values)):
            mine[:, row, :, :length] = theirs[:, source, :, :length]
        self.lengths[row] = length
        self._wait(row)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int] = ()) -> list[list[int]]:
        """The most likely tokens after each prompt: at most `tokens`, and up to the first of `ends`, which is left out.

        `stop()` ends it early, with what there is by then. Raises ArithmeticError where the model computes no numbers.
        """
        if len(prompts) > self.rows:
            raise InputError(
                f"{len(prompts)} prompts: there is room for {self.rows}", hint="make the kernel with more rows"
            )
        made: list[list[int]] = [[] for _ in prompts]
        going: list[int] = []
        try:
            for row, ids in enumerate(prompts):
                if self._stopping.value:
                    break
                (token,) = most_likely(self.read(row, ids)[None], [0])
                if tokens > 0 and token not in ends:
                    made[row].append(token)
                    if tokens > 1 and self.lengths[row] < self.positions:
                        going.append(row)
            if going and not self._stopping.value:
                for row in going:
                    self.follow(row, made[row][-1])
                self._go_on(going, made, tokens, ends)
        finally:
            self._stopping.value = 0
        return made

    def stop(self, yes: bool = True) -> None:
        """End the generation that another thread runs after the token it is at; if none is, the next one at once. `yes`:
        False takes that back."""
        self._stopping.value = int(yes)

    @property
    def stopping(self) -> bool:
        return bool(self._stopping.value)

    def _go_on(self, going: list[int], made: list[list[int]], tokens: int, ends: Collection[int]) -> None:
        """Add to `made` what comes after the tokens that rows `going` follow with."""
        while going:
            best = most_likely(self.step(), going)
            before, going = going, []
            for row, token in zip(before, best, strict=True):
                if token not in ends:
                    made[row].append(token)
                    if len(made[row]) < tokens and self.lengths[row] < self.positions and not self._stopping.value:
                        self.follow(row, token)
                        going.append(row)

    def _check(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise InputError(f"row {row} is not one of {self.rows}")


def most_likely(logits: Tensor, rows: Sequence[int]) -> list[int]:
    """The token with the largest logit in each of these rows. Raises ArithmeticError where that is no number."""
    top = logits.argmax(-1, keepdim=True)  # of NaN where there is one
    found = torch.cat(
        (top, torch.isfinite(logits.gather(-1, top)).to(top.dtype)), -1
    ).tolist()  # one look at the device
    best, finite = zip(*found, strict=True)
    if not all(finite[row] for row in rows):
        raise ArithmeticError("the model computed NaN or infinity")
    return [best[row] for row in rows]
