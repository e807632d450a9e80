"""Space in the ring: where the next block goes, and whose memory it overwrites. No tensors, no threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anytorch.memory.sizes import PAGE, round_up


@dataclass(frozen=True)
class Left:
    """A region that was given up, and the event after which it may be overwritten (None: at once)."""

    start: int
    end: int
    event: Any


class Space:
    """First-fit regions of `nbytes` bytes, on page boundaries."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: dict[str, tuple[int, int]] = {}
        self._left: list[Left] = []

    def take(self, name: str, nbytes: int) -> int | None:
        """The offset of a free region, now taken; None when there is none."""
        assert name not in self._taken
        at = 0
        for start, end in sorted(self._taken.values()):
            if start - at >= nbytes:
                break
            at = max(at, round_up(end, PAGE))
        if at + nbytes > self.nbytes:
            return None
        self._taken[name] = (at, at + nbytes)
        return at

    def give_back(self, name: str, event: Any = None) -> None:
        start, end = self._taken.pop(name)
        if event is not None:
            self._left.append(Left(start, end, event))

    def wait_for(self, name: str, wait: Callable[[Any], None]) -> None:
        """Call `wait` with the event of every region that this one overwrites."""
        start, end = self._taken[name]
        kept = []
        for region in self._left:
            if region.start < end and start < region.end:
                wait(region.event)
                # The parts that stick out keep their event for whoever overwrites them.
                if region.start < start:
                    kept.append(Left(region.start, start, region.event))
                if region.end > end:
                    kept.append(Left(end, region.end, region.event))
            else:
                kept.append(region)
        self._left = kept

    def offset(self, name: str) -> int:
        return self._taken[name][0]
