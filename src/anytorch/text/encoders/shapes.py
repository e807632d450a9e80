"""Choose the shapes a batch is cut into. Pure: lengths in, a plan out.

A recorded graph, a compiled kernel or Metal's kernel cache belongs to one shape. Texts come in any length, so the shapes
are rounded up to a small set: few enough to be kept, close enough together that little is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SMALLEST_TOKENS = 128
TOKENS_PER_ROW = 8  # a chunk has at most one text for so many tokens of its budget: shorter ones split the batch
LENGTH_STEP = 8  # padded lengths are multiples of it: kernels read masks and rows in vectors of that many


@dataclass(frozen=True)
class PackedShape:
    """`tokens` end to end in at most `rows` texts, none longer than `longest`."""

    tokens: int
    rows: int
    longest: int


@dataclass(frozen=True)
class RowShape:
    """`rows` texts padded to `length`."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Chunk:
    """Texts computed together: their places in the batch, and the shape they are laid out in."""

    texts: npt.NDArray[np.intp]
    shape: PackedShape | RowShape


def step_up(value: int, smallest: int, steps: int = 4) -> int:
    """The next size of a ladder with `steps` rungs per doubling: at most 1/steps of it is filling.

    >>> [step_up(n, 16, 2) for n in (1, 16, 17, 25, 33, 100)]
    [16, 16, 24, 32, 48, 128]
    """
    if value <= smallest:
        return smallest
    base = smallest
    while base * 2 < value:
        base *= 2
    rung = max(1, base // steps)
    return base + -(-(value - base) // rung) * rung


def longest_class(longest: int, most: int) -> int:
    """32, 64, 128, …: kernels have a tile of that size, or one for every 128 tokens of the longest text, in every text."""
    size = 32
    while size < longest:
        size *= 2
    return min(size, most)


def most_rows(tokens: int) -> int:
    """More texts than this do not go into a chunk of so many tokens, however short they are."""
    return max(16, tokens // TOKENS_PER_ROW)


def row_class(rows: int) -> int:
    """16, 32, 64, …: a flash kernel's blocks for texts that are not there leave at once, but each must be started.

    (On an H200 a chunk of 64 texts in a shape for 2,048 took twice as long as it should.)
    """
    return max(16, 1 << (rows - 1).bit_length())


def largest(budget: int, most: int, *, fixed: bool) -> tuple[int, int]:
    """Tokens and texts of the largest chunk: an exact shape can have a text per token, a fixed one rounds its rows up."""
    tokens = step_up(max(budget, most), SMALLEST_TOKENS)
    return tokens, row_class(most_rows(tokens)) if fixed else tokens


def even_budget(total: int, longest: int, budget: int) -> int:
    """The least tokens per chunk with which `total` still takes no more chunks than with `budget`.

    A chunk ends where the next text would not fit: up to `longest` - 1 tokens before its budget is full.

    >>> even_budget(40_000, 25, 16_384), even_budget(16_000, 25, 16_384), even_budget(100, 500, 384)
    (13358, 16024, 384)
    """
    sure = budget - longest + 1  # tokens that every chunk but the last holds at least
    if sure < 1:
        return budget
    chunks = -(-total // sure)
    return min(budget, -(-total // chunks) + longest - 1)


def plan_packed(
    lengths: Sequence[int] | npt.NDArray[np.integer], budget: int, most: int, *, fixed: bool
) -> list[Chunk]:
    """Consecutive texts, at most `budget` tokens together. `fixed` rounds the shapes up; else they are exact.

    One text longer than the budget is a chunk of its own. `most` is the longest text the model takes. Fixed shapes share a
    batch evenly: one cut off at the budget would leave a few texts for a chunk of their own, which takes as many kernels.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    ends = np.cumsum(sizes)
    rows_limit = most_rows(budget) if fixed else len(sizes)
    if fixed and len(sizes):
        budget = even_budget(int(ends[-1]), int(sizes.max()), budget)
    chunks: list[Chunk] = []
    begin = 0
    while begin < len(sizes):
        base = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + budget, side="right")))
        end = min(end, begin + rows_limit)
        tokens, longest, rows = int(ends[end - 1]) - base, int(sizes[begin:end].max()), end - begin
        if fixed:
            shape = PackedShape(step_up(tokens, SMALLEST_TOKENS), row_class(rows), longest_class(longest, most))
        else:
            shape = PackedShape(tokens, rows, longest)
        chunks.append(Chunk(np.arange(begin, end), shape))
        begin = end
    return chunks


def padded_length(longest: int, most: int) -> int:
    """8, 16, 24, 32, then four lengths per doubling: 40, 48, 56, 64, 80, …; never more than the model takes."""
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP if longest <= 32 else step_up(longest, 32)
    return min(length, max(most, longest))


def plan_rows(lengths: Sequence[int] | npt.NDArray[np.integer], budget: int, most: int, *, fixed: bool) -> list[Chunk]:
    """Texts of similar length, padded to rectangles of at most `budget` tokens; the longest first.

    `fixed` takes lengths from a ladder and row counts from the powers of two; else a rectangle is as long as its longest
    text. A rectangle ends where a text would leave more than an eighth of its row empty, except that rows which a power of
    two has anyway are given to the next texts.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    falling = -sizes[order]  # ascending, for searchsorted
    chunks: list[Chunk] = []
    begin = 0
    while begin < len(order):
        longest = int(-falling[begin])
        length = padded_length(longest, most) if fixed else longest
        rows_limit = max(1, budget // length)
        shortest = length - max(LENGTH_STEP, length // 8)
        end = min(begin + rows_limit, max(begin + 1, int(np.searchsorted(falling, -shortest, side="left"))))
        rows = end - begin
        if fixed:
            rows = 1 << (rows - 1).bit_length()
            if rows > rows_limit:
                rows //= 2
            end = min(begin + rows, len(order))
        chunks.append(Chunk(order[begin:end], RowShape(rows, length)))
        begin = end
    return chunks
