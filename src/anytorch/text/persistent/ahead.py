"""Recorded steps that choose their tokens on the device, so that the next step is under way before the host has seen them.

The host looks at a step's tokens while the device computes the step after it. What it then finds to be over has been
computed one token too far, at a place that is written again by whoever comes next.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from anytorch.text.decoders.choosing import NO_NUMBER, Choice, candidates_of, chosen
from anytorch.text.decoders.steps import PlacedSteps, RecordedSteps

AHEAD = 2  # steps that are under way at once: one that runs, one that waits behind it


class Ahead(PlacedSteps):
    """Steps that give tokens in place of logits; ahead of the host on devices with events and pinned memory."""

    ahead = AHEAD
    _slots: list[_Slot] | None = None

    @torch.no_grad()
    def tokens(self, rows: Sequence[int], choices: Sequence[Choice]) -> Generator[list[int], None, None]:
        """The next token of each of these rows, then the ones after those, and so on: `follow` has put the first there.

        It ends where a row is full, or has as many as its choice asks for. Closed, it leaves every row with the tokens that
        were given but the last, which nobody has followed yet. Raises ArithmeticError where the model computes no numbers.
        """
        device = self._given.device
        if self._slots is None:
            self._slots = [_Slot(self.rows, device) for _ in range(self.ahead)]
            # What a recording reads beside ids and places. Temperature, top_k, top_p, point:
            kinds = (torch.float32, torch.int64, torch.float64, torch.float64)
            self._asked = [torch.zeros(self.rows, dtype=kind, device=device) for kind in kinds]
            self._going = torch.zeros(self.rows, dtype=torch.bool, device=device)
        candidates = candidates_of(choices, self.vocabulary)
        self._ask(rows, choices)
        room = min(self.positions - self.lengths[row] for row in rows)
        steps = min([room + 1, *(choice.most for choice in choices if choice.most is not None)])
        launched = seen = 0
        try:
            while seen < steps:
                while launched < steps and launched - seen < self.ahead:
                    self._launch(rows, choices, candidates, launched - seen, self._slots[launched % self.ahead])
                    launched += 1
                made = self._slots[seen % self.ahead].wait(rows)
                seen += 1
                if NO_NUMBER in made:
                    raise ArithmeticError("the model computed NaN or infinity")
                yield made
                if seen < steps:
                    for row in rows:
                        self.lengths[row] += 1  # the device has followed by itself
        finally:
            if device.type != "cpu":
                torch.get_device_module(device).current_stream(device).synchronize()
            for row in rows:
                self._wait(row)

    def _ask(self, rows: Sequence[int], choices: Sequence[Choice]) -> None:
        """Put what is asked for where recordings read it."""
        mine = {row: choice for row, choice in zip(rows, choices, strict=True)}
        every = [mine.get(row, Choice()) for row in range(self.rows)]
        for at, name in enumerate(("temperature", "top_k", "top_p")):
            given = torch.tensor([getattr(choice, name) for choice in every], dtype=self._asked[at].dtype)
            self._asked[at].copy_(given)
        self._going.copy_(torch.tensor([row in mine for row in range(self.rows)]))
        self._given.copy_(self._next)

    def _launch(self, rows: Sequence[int], choices: Sequence[Choice], candidates: int, ahead: int, slot: _Slot) -> None:
        """Queue one step, the tokens' way to the host, and their way into the next step."""
        if candidates > 1:
            slot.points.zero_()
            for row, choice in zip(rows, choices, strict=True):
                slot.points[row] = choice.points(ahead + 1)[ahead]
            self._asked[3].copy_(slot.points, non_blocking=True)
        count, places = self._extent(ahead)
        made = self._recorder.run((count, places, candidates), lambda: self._tokens_of(count, places, candidates))
        slot.tokens[:count].copy_(made, non_blocking=True)
        slot.mark()
        ids, going = self._ids[:count], self._going[:count]
        torch.where(going, made.clamp_min(0), ids, out=ids)
        self._places[:count].add_(going)

    def _tokens_of(self, rows: int, places: int, candidates: int) -> Tensor:
        return chosen(self._kept_alive(rows, places), candidates, *(one[:rows] for one in self._asked))


class AheadSteps(Ahead, RecordedSteps):
    """`RecordedSteps` that are ahead of the host."""


class _Slot:
    """A step's tokens on their way to the host, and the random numbers on theirs to the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int64)
        self.points = torch.zeros(rows, dtype=torch.float64)
        self._event: Any = None
        if device.type != "cpu":
            self.tokens, self.points = self.tokens.pin_memory(), self.points.pin_memory()
            self._event = torch.get_device_module(device).Event()

    def mark(self) -> None:
        """What has been queued so far is what `wait` waits for."""
        if self._event is not None:
            self._event.record()

    def wait(self, rows: Sequence[int]) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        found = self.tokens.tolist()
        return [found[row] for row in rows]
