"""Where the boxes of a graph's picture stand, and how the lines between them run: no line passes through a box.

Boxes stand in rows, each below all that it reads. A line that goes further than to the next row has a place of its own in
every row between, as if a narrow box stood there, and runs straight down through it; between two rows there are no boxes.
Rows are ordered by where their neighbours stand, so that few lines cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LINE = 10  # how wide the place of lines is
APART = 22  # between two boxes; half of that beside a line
ORDERS, SPREADS = 8, 64  # how often all rows are gone over, down and up: to order them, and to straighten lines

Place = tuple[int, int]  # (node, row): the node's box, or below that row the lines that come from it


@dataclass(frozen=True)
class Placed:
    """`rows` of the nodes, the middles `x` of all places, and how `wide` all is, from 0 on. A box is `box` wide."""

    rows: Mapping[int, int]
    x: Mapping[Place, float]
    wide: float
    box: float

    def way(self, source: int, reader: int) -> list[Place]:
        """The places of a line: the source's box, those where it runs straight down, the reader's box."""
        between = range(self.rows[source] + 1, self.rows[reader])
        return [(source, self.rows[source]), *((source, row) for row in between), (reader, self.rows[reader])]


def placed(reads: Mapping[int, Sequence[int]], box: float) -> Placed:
    """Places for nodes, each with the nodes that it reads; a node stands behind those that it reads."""
    rows = _rows(reads)
    room = _Room(rows, box)
    above: dict[Place, list[Place]] = {(node, row): [] for node, row in rows.items()}
    for node, sources in reads.items():
        for source in dict.fromkeys(sources):
            for row in range(rows[source] + 1, rows[node]):
                above[source, row] = [(source, row - 1)]
            above[node, rows[node]].append((source, rows[node] - 1))
    below: dict[Place, list[Place]] = {place: [] for place in above}
    for place, sources_of in above.items():
        for source_place in sources_of:
            below[source_place].append(place)
    levels: list[list[Place]] = [[] for _ in range(max(rows.values(), default=-1) + 1)]
    for place in sorted(above):
        levels[place[1]].append(place)
    _order(levels, above, below)
    x = _spread(levels, above, below, room)
    left = min((at - room.half(place) for place, at in x.items()), default=0.0)
    x = {place: round(at - left, 1) for place, at in x.items()}
    return Placed(rows, x, max((at + room.half(place) for place, at in x.items()), default=0.0), box)


@dataclass(frozen=True)
class _Room:
    rows: Mapping[int, int]
    box: float

    def is_box(self, place: Place) -> bool:
        return self.rows[place[0]] == place[1]

    def half(self, place: Place) -> float:
        return (self.box if self.is_box(place) else LINE) / 2

    def between(self, place: Place, following: Place) -> float:
        """The least distance between the middles of two neighbouring places."""
        apart = APART if self.is_box(place) and self.is_box(following) else APART / 2
        return self.half(place) + apart + self.half(following)


def _rows(reads: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Below all that it reads; what reads nothing stands just above the first that reads it."""
    rows: dict[int, int] = {}
    for node, sources in reads.items():
        rows[node] = 1 + max((rows[source] for source in sources), default=-1)
    first: dict[int, int] = {}
    for node, sources in reads.items():
        for source in sources:
            first[source] = min(first.get(source, rows[node]), rows[node])
    return {node: first[node] - 1 if not reads[node] and node in first else row for node, row in rows.items()}


def _order(
    levels: list[list[Place]], above: Mapping[Place, Sequence[Place]], below: Mapping[Place, Sequence[Place]]
) -> None:
    """Sort every row by the mean rank of its neighbours, from above and from below in turns."""
    for sweep in range(ORDERS):
        down = sweep % 2 == 0
        neighbours = above if down else below
        ranks: dict[Place, float] = {}
        for level in levels if down else reversed(levels):
            own = {place: float(rank) for rank, place in enumerate(level)}
            level.sort(key=lambda place: _mean([ranks[one] for one in neighbours[place]], own[place]))
            ranks.update((place, float(rank)) for rank, place in enumerate(level))


def _spread(
    levels: Sequence[Sequence[Place]],
    above: Mapping[Place, Sequence[Place]],
    below: Mapping[Place, Sequence[Place]],
    room: _Room,
) -> dict[Place, float]:
    """The middle of every place: as near to its neighbours' as its row has room, in the row's order."""
    x: dict[Place, float] = {}
    for level in levels:
        _put(level, [0.0] * len(level), room, x)
    for sweep in range(SPREADS):
        for level in levels if sweep % 2 == 0 else reversed(levels):
            wanted = [_mean([x[one] for one in (*above[place], *below[place])], x[place]) for place in level]
            _put(level, wanted, room, x)
    return x


def _put(level: Sequence[Place], wanted: Sequence[float], room: _Room, x: dict[Place, float]) -> None:
    """Put a row as near to where it wants to stand as its order and its widths let it (least squares).

    Neighbours that would overlap are joined to a run that stands where its members want to be on average, until no two runs
    overlap (pool adjacent violators).
    """
    offset = 0.0  # of a place from the row's first, were all as close as they may be
    runs: list[tuple[float, list[tuple[Place, float]]]] = []  # (where the first would then stand, members and offsets)
    for number, place in enumerate(level):
        offset += room.between(level[number - 1], place) if number else 0.0
        start, members = wanted[number] - offset, [(place, offset)]
        while runs and runs[-1][0] > start:
            before, others = runs.pop()
            start = (before * len(others) + start * len(members)) / (len(others) + len(members))
            members = [*others, *members]
        runs.append((start, members))
    for start, members in runs:
        x.update((place, start + at) for place, at in members)


def _mean(numbers: Sequence[float], default: float) -> float:
    return sum(numbers) / len(numbers) if numbers else default
