"""The books of the ring: what comes next, where in the ring it goes, and what it overwrites. No tensors, no threads.

A step is used in several ways: in forward, once more within backward where activations are computed again, and in backward
itself. Each use remembers which one came after it, so a training loop (forward up, backward down, and again) is followed as
well as a chain of forwards, and a program that does something else is followed from its second time on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anytorch.memory.sizes import PAGE, round_up

FORWARD = "forward"  # without a backward to come, as far as can be known
TRAINING = "training"  # of a module in training mode
AGAIN = "again"  # computed once more within backward
BACKWARD = "backward"
Use = tuple[str, str]  # the way and the step


class UseOrder:
    """Remember which use follows which. At first forwards follow each other, and backward goes the other way."""

    def __init__(self, steps: Sequence[str]) -> None:
        self._next: dict[Use, Use] = {}
        for way, order in ((FORWARD, steps), (TRAINING, steps), (BACKWARD, steps[::-1])):
            for step, following in zip(order, [*order[1:], *order[:1]], strict=True):
                self._next[way, step] = (way, following)
        for step in steps:
            self._next[AGAIN, step] = (BACKWARD, step)
        self._now: Use | None = None

    def follow(self, step: str, way: str) -> None:
        """Record that this use begins now."""
        use = (way, step)
        if self._now is not None and self._now != use:
            self._next[self._now] = use
        self._now = use

    def at(self, step: str) -> bool:
        """Return True if the newest use is one of this step."""
        return self._now is not None and self._now[1] == step

    def ahead(self) -> Iterator[tuple[int, str]]:
        """The steps to come with their distance (1 is the next use), until the newest use comes round again."""
        current = self._now
        for distance in range(1, len(self._next) + 1):
            if current is None:
                return
            current = self._next.get(current)
            if current is None or current == self._now:
                return
            yield distance, current[1]


@dataclass(frozen=True)
class Region:
    start: int
    end: int


class RingSpace:
    """First-fit regions of `nbytes` bytes, on page boundaries."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: set[Region] = set()
        self._left: list[tuple[Region, Any]] = []  # given up, with the event after which it may be overwritten

    def find(self, nbytes: int) -> Region | None:
        """A free region; None when there is none."""
        at = 0
        for taken in sorted(self._taken, key=lambda region: region.start):
            if taken.start - at >= nbytes:
                break
            at = max(at, round_up(taken.end, PAGE))
        return Region(at, at + nbytes) if at + nbytes <= self.nbytes else None

    def take(self, nbytes: int) -> Region | None:
        """A free region, now taken; None when there is none."""
        region = self.find(nbytes)
        if region is not None:
            self._taken.add(region)
        return region

    def give_back(self, region: Region, event: Any = None) -> None:
        self._taken.remove(region)
        if event is not None:
            self._left.append((region, event))

    def wait_for(self, new: Region, wait: Callable[[Any], None]) -> None:
        """Call `wait` with the event of every region that this one overwrites."""
        kept = []
        for old, event in self._left:
            if old.start < new.end and new.start < old.end:
                wait(event)
                # The parts that stick out keep their event for whoever overwrites them.
                if old.start < new.start:
                    kept.append((Region(old.start, new.start), event))
                if old.end > new.end:
                    kept.append((Region(new.end, old.end), event))
            else:
                kept.append((old, event))
        self._left = kept
