"""Choosing tokens without asking the host for each: what a text asks for, and the same choice for all rows at once.

A choice by chance takes one random number a token, and the token whose share of the sorted distribution it falls into. So
the same seed gives the same text wherever the choice is made, up to rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

NO_NUMBER = -2  # in place of a token: the model computed NaN or infinity
FEWEST, MOST = 64, 1024  # candidates that are sorted where top_k bounds them; beyond, the whole vocabulary is


class Points:
    """Random numbers from 0 to 1, one for each token; they can be looked at before they are used up."""

    def __init__(self, random: torch.Generator) -> None:
        self._random, self._drawn = random, deque[float]()

    def ahead(self, count: int) -> list[float]:
        """The next so many, which stay."""
        while len(self._drawn) < count:
            self._drawn.append(float(torch.rand((), generator=self._random, dtype=torch.float64)))
        return [self._drawn[number] for number in range(count)]

    def take(self) -> float:
        """The next one, used up."""
        (one,) = self.ahead(1)
        self._drawn.popleft()
        return one


def no_points(count: int) -> list[float]:
    return [0.0] * count


@dataclass(frozen=True)
class Choice:
    """How a row's tokens are chosen, and which of them will be its last. Temperature 0 takes the most likely one.

    `points`: the random numbers of the next so many tokens. Of tokens after the first of `ends`, or after `most`, nobody
    will ask: a kernel need not compute them.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    points: Callable[[int], Sequence[float]] = no_points
    ends: Collection[int] = field(default=())
    most: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def candidates_of(choices: Sequence[Choice], vocabulary: int) -> int:
    """How many of the most likely tokens must be sorted for these: 1 where all take the best, else a power of two that
    top_k stays within, or the vocabulary. Few values, as each is a recording of its own."""
    most = 1
    for choice in choices:
        if not choice.greedy:
            wanted = choice.top_k if 0 < choice.top_k <= MOST else vocabulary
            most = max(most, wanted if wanted == vocabulary else max(FEWEST, 1 << (wanted - 1).bit_length()))
    return min(most, vocabulary)


def chosen(
    logits: Tensor,  # [rows, vocabulary]
    candidates: int,
    temperature: Tensor,  # float32 [rows]; 0: the most likely
    top_k: Tensor,  # int64 [rows]; 0: all
    top_p: Tensor,  # float64 [rows]
    point: Tensor,  # float64 [rows]
) -> Tensor:
    """A token for each row, int64 [rows]; NO_NUMBER where the best logit is not finite. Can be recorded."""
    if candidates == 1:
        best, tokens = logits.max(-1, keepdim=True)
        made = tokens[:, 0]
        return torch.where(torch.isfinite(best[:, 0]), made, NO_NUMBER)
    wide = logits.float()
    if candidates < logits.shape[-1]:
        values, tokens = torch.topk(wide, candidates)
    else:
        values, tokens = torch.sort(wide, descending=True, stable=True)
    finite = torch.isfinite(values[:, 0])
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None]
    place = torch.arange(candidates, device=logits.device)
    inside = (place < torch.where(top_k > 0, top_k, candidates)[:, None]) & (
        (place == 0) | (temperature > 0)[:, None]  # the most likely one is all there is
    )
    shares = torch.softmax((values / heat).double().masked_fill(~inside, -torch.inf), -1)
    reached = shares.cumsum(-1)
    # The smallest number of tokens whose shares reach top_p; at least one, and none that is not inside.
    last = torch.minimum((reached < top_p[:, None]).sum(-1), inside.sum(-1) - 1)
    bound = point * reached.gather(-1, last[:, None])[:, 0]
    at = torch.minimum((reached <= bound[:, None]).sum(-1), last)
    return torch.where(finite, tokens.gather(-1, at[:, None])[:, 0], NO_NUMBER)
