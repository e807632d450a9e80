"""Counts in words with the right plural: never "1 texts"."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """ "1 text", "2,048 texts". `many` where it is not `one` and an s, and where a verb follows.

    >>> counted(1, "row is kept", "rows are kept")
    '1 row is kept'
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
