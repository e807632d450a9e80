"""Space in the ring: where the next block goes, and whose memory it overwrites. No tensors, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anytorch.memory.sizes import PAGE, round_up


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
