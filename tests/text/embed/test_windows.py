"""Windows for a device that waits: early ones first, then full chunks, every text once and in order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anytorch.errors import UsageError
from anytorch.text.embed.tokens import Tokens
from anytorch.text.embed.windows import EARLY, Window, chunks, fill_count, full_chunks, windows
from anytorch.text.encoders.shapes import plan_packed


def tokenize(texts: list[str], first: int) -> Tokens:
    """A token per character, whose id is the text's number; one text of a hundred counts as cut."""
    lengths = [len(text) for text in texts]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.repeat(np.arange(first, first + len(texts)), lengths).astype(np.int32)
    return Tokens(ids, starts, sum(1 for number in range(first, first + len(texts)) if number % 100 == 0))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def texts_of(count: int) -> list[str]:
    generator = np.random.default_rng(3)
    return ["x" * int(n) for n in generator.integers(1, 60, count)]


@pytest.mark.parametrize("count", [0, 1, 64, 65, 129, 5000])
def test_every_text_once_and_in_order(pool: ThreadPoolExecutor, count: int) -> None:
    texts = texts_of(count)
    found = windows(iter(texts), tokenize, target_tokens=lambda: 8192, early=pool)
    made = list(full_chunks(found, 4096))
    assert [window.first for window in made] == np.cumsum([0, *(w.count for w in made)])[:-1].tolist()
    ids = np.concatenate([window.tokens.ids for window in made]) if made else np.array([])
    np.testing.assert_array_equal(ids, np.repeat(np.arange(count), [len(text) for text in texts]))
    for window in made:
        assert window.tokens.starts[0] == 0 and window.tokens.starts[-1] == len(window.tokens.ids)
    assert sum(window.tokens.truncated for window in made) == -(-count // 100), "counted once each"


def test_windows_after_the_first_fill_their_chunks(pool: ThreadPoolExecutor) -> None:
    made = list(full_chunks(windows(texts_of(9000), tokenize, target_tokens=lambda: 8192, early=pool), 4096))
    middle = made[len(EARLY) : -1]
    assert len(middle) > 10
    for window in middle:
        cut = plan_packed(window.tokens.lengths, 4096, 512, fixed=True)
        filled = int(window.tokens.starts[-1]) / (4096 * len(cut))
        assert filled > 0.96, f"{len(cut)} chunks hold {filled:.2f} of their tokens"


def test_long_texts_make_short_windows(pool: ThreadPoolExecutor) -> None:
    """What was drawn for an early window and did not fit is not all in the next one."""
    made = list(windows(["x" * 4000] * 600, tokenize, target_tokens=lambda: 65536, early=pool))
    assert [window.count for window in made[: len(EARLY)]] == [characters // 4000 for _, characters in EARLY]
    assert all(window.count <= 64 for window in made[len(EARLY) :])


def test_one_text_that_no_chunk_holds_twice() -> None:
    tokens = tokenize(["x" * 3000, "y" * 10], 0)
    assert fill_count(tokens, 4096) == 2, "given out as they are: nothing would be gained by waiting"
    window = Window(7, tokens)
    assert [made.first for made in full_chunks([window], 4096)] == [7]


def test_texts_are_drawn_as_they_are_needed(pool: ThreadPoolExecutor) -> None:
    drawn = [0]

    def source() -> Iterator[str]:
        for number in range(100_000):
            drawn[0] = number
            yield "some text"

    made = windows(source(), tokenize, target_tokens=lambda: 4096, early=pool)
    next(made)
    assert drawn[0] < 1000
    made.close()


def test_a_pool_that_is_gone_is_said_plainly(pool: ThreadPoolExecutor) -> None:
    pool.shutdown()
    with pytest.raises(UsageError, match="the engine is closed"):
        list(windows(texts_of(500), tokenize, target_tokens=lambda: 4096, early=pool))


def test_chunks_hold_one_text_at_least() -> None:
    assert [len(part) for part in chunks(["x" * 9] * 3, lambda _: 2, lambda _: 5)] == [1, 1, 1]
