"""One thing is no plural, in every message."""

from __future__ import annotations

import pytest

from anytorch.counts import counted


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("text",), "0 texts"),
        (1, ("text",), "1 text"),
        (2, ("text",), "2 texts"),
        (300_000, ("token",), "300,000 tokens"),
        (1, ("launch", "launches"), "1 launch"),
        (3, ("launch", "launches"), "3 launches"),
        (1, ("row is kept", "rows are kept"), "1 row is kept"),
        (12_288, ("row is kept", "rows are kept"), "12,288 rows are kept"),
    ],
)
def test_counted(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said
