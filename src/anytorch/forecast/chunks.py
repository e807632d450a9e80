"""How many windows to compute at once. Pure: sizes in, pieces out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Rows whose temporary values exist at once. On a host 1024 rows already saturate the matrix products, and more would
# cost more memory than the published loop; an accelerator is busy only with many more.
HOST_ROWS, ACCELERATOR_ROWS = 1024, 32768
HOST_WINDOWS, ACCELERATOR_WINDOWS = 64, 4096  # series × samples


@dataclass(frozen=True)
class Chunk:
    """Some series (their places) with some of their samples (`first` … `last` - 1)."""

    series: tuple[int, ...]
    first: int
    last: int


def split(lengths: Sequence[int], samples: int, most_windows: int, nbytes: Sequence[int], budget: int) -> list[Chunk]:
    """Series sorted by length, longest first, in chunks of at most `most_windows` windows and `budget` bytes.

    `nbytes` says what one window of each series takes. A chunk always has at least one window.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    chunks: list[Chunk] = []
    waiting: list[int] = []
    used = 0
    for place in order:
        whole = nbytes[place] * samples
        if samples > most_windows or whole > budget:  # too much by itself: a few samples at a time
            at_once = max(1, min(most_windows, budget // max(1, nbytes[place])))
            chunks += [Chunk((place,), first, min(first + at_once, samples)) for first in range(0, samples, at_once)]
            continue
        if waiting and ((len(waiting) + 1) * samples > most_windows or used + whole > budget):
            chunks.append(Chunk(tuple(waiting), 0, samples))
            waiting, used = [], 0
        waiting.append(place)
        used += whole
    if waiting:
        chunks.append(Chunk(tuple(waiting), 0, samples))
    return chunks
