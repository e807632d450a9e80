"""Which texts of which requests go into the next batch. Pure, so that fairness can be tested without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """Texts [begin, end) of the request at this place in the list."""

    request: int
    begin: int
    end: int


def share_batch(waiting: Sequence[tuple[int, Sequence[int]]], budget: int) -> list[Share]:
    """Fill one batch of `budget` tokens from requests, oldest first, each given as (next text, lengths of all texts).

    First everyone gets an equal part of the budget, so that a short request is served at once beside a long one; what is
    left goes to the oldest request, then to those with the least left to do. The oldest always gets at least one text,
    so that nobody waits for ever.
    """
    if not waiting:
        return []
    ends = [begin for begin, _ in waiting]
    left = budget
    equal = budget // len(waiting)
    for place, (begin, lengths) in enumerate(waiting):
        part = min(equal, left)
        while ends[place] < len(lengths) and lengths[ends[place]] <= part:
            part -= lengths[ends[place]]
            left -= lengths[ends[place]]
            ends[place] += 1
        if place == 0 and ends[0] == begin and begin < len(lengths):
            left -= lengths[begin]
            ends[0] += 1
    by_rest = sorted(range(1, len(waiting)), key=lambda place: sum(waiting[place][1][ends[place] :]))
    for place in (0, *by_rest):
        lengths = waiting[place][1]
        while ends[place] < len(lengths) and lengths[ends[place]] <= left:
            left -= lengths[ends[place]]
            ends[place] += 1
    return [Share(place, begin, ends[place]) for place, (begin, _) in enumerate(waiting) if ends[place] > begin]
