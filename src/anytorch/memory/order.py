"""What comes next: the uses of a model's steps, as they followed each other the last time. No tensors, no threads.

A step is used in several ways: in forward, once more within backward where activations are computed again, and in backward
itself. Each use remembers which one came after it, so a training loop (forward up, backward down, and again) is followed as
well as a chain of forwards, and a program that does something else is followed from its second time on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

FORWARD = "forward"  # without a backward to come, as far as can be known
TRAINING = "training"  # of a module in training mode
AGAIN = "again"  # computed once more within backward
BACKWARD = "backward"
Use = tuple[str, str]  # the way and the step


class Order:
    """Which use follows which. Before anything was seen: forwards follow each other, and backward goes the other way."""

    def __init__(self, steps: Sequence[str]) -> None:
        self._next: dict[Use, Use] = {}
        for way, order in ((FORWARD, steps), (TRAINING, steps), (BACKWARD, steps[::-1])):
            for step, following in zip(order, [*order[1:], *order[:1]], strict=True):
                self._next[way, step] = (way, following)
        for step in steps:
            self._next[AGAIN, step] = (BACKWARD, step)
        self._now: Use | None = None

    def follow(self, step: str, way: str) -> None:
        """This use begins now."""
        use = (way, step)
        if self._now is not None and self._now != use:
            self._next[self._now] = use
        self._now = use

    def at(self, step: str) -> bool:
        """Is the newest use one of this step?"""
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
