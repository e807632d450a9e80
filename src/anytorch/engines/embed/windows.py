"""Texts of any iterable, a window at a time, tokenized one window ahead of whoever computes.

The iterable is drawn from in the caller's own thread (a database cursor may belong to it); only tokenizing, which
releases the GIL, happens beside. Memory is bounded: at most `AHEAD` windows exist besides the one being computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING

from anytorch.engines.embed.tokens import Tokens
from anytorch.values import dataclass

if TYPE_CHECKING:
    from concurrent.futures import Future

FIRST_TEXTS = 64  # a small first window: the encoder starts sooner
MOST_TEXTS = 8192
MOST_CHARACTERS = 4_000_000  # of one window
AHEAD = 2


@dataclass(frozen=True)
class Window:
    first: int  # number of its first text
    tokens: Tokens

    @property
    def count(self) -> int:
        return len(self.tokens.starts) - 1


def chunks(texts: Iterable[str], size: Callable[[int], int]) -> Iterator[list[str]]:
    """Lists of texts; `size(number)` says how many the next one may hold. Bounded by characters too. Lazy."""
    source = iter(texts)
    number = 0
    left: list[str] = []
    while True:
        wanted = size(number) - len(left)
        chunk = left + list(islice(source, max(0, wanted)))
        if not chunk:
            return
        cut = _within(chunk)
        yield chunk[:cut]
        left = chunk[cut:]
        number += 1


def _within(chunk: list[str]) -> int:
    """How many texts of a chunk stay within MOST_CHARACTERS; one at least."""
    try:
        if sum(map(len, chunk)) <= MOST_CHARACTERS:  # nearly always, and in a tenth of the loop's time
            return len(chunk)
    except TypeError:
        pass  # not all are texts: whoever tokenizes them says so
    total = 0
    for index, text in enumerate(chunk):
        total += len(text) if isinstance(text, str) else 0
        if total > MOST_CHARACTERS and index:
            return index
    return len(chunk)


def windows(
    texts: Iterable[str],
    tokenize: Callable[[list[str], int], Tokens],
    *,
    target_tokens: Callable[[], int],
    workers: int = 1,
    known: int | None = None,
) -> Iterator[Window]:
    """Tokenized windows in order. `target_tokens()` is how many tokens a window should hold; `known` the number of texts."""
    seen = [0, 0]  # texts and tokens so far: what an average text holds

    def size(number: int) -> int:
        if number == 0 or not seen[0]:
            return FIRST_TEXTS
        average = max(1.0, seen[1] / seen[0])
        ramp = FIRST_TEXTS << (2 * min(number, 8))
        return max(FIRST_TEXTS, min(MOST_TEXTS, ramp, int(target_tokens() / average)))

    first = 0
    pieces = chunks(texts, size)
    with ExitStack() as stack:
        if known is not None and known <= FIRST_TEXTS:  # one window: no thread
            for piece in pieces:
                yield Window(first, tokenize(piece, first))
                first += len(piece)
            return
        from concurrent.futures import ThreadPoolExecutor

        pool = ThreadPoolExecutor(workers, thread_name_prefix="anytorch-tokenize")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        waiting: deque[tuple[int, Future[Tokens]]] = deque()
        for piece in pieces:
            waiting.append((first, pool.submit(tokenize, piece, first)))
            if not seen[0]:
                _count(waiting[0][1].result(), seen)  # what an average text holds sizes the windows that follow
            first += len(piece)
            if len(waiting) > AHEAD:
                yield _ready(waiting, seen)
        while waiting:
            yield _ready(waiting, seen)


def _count(tokens: Tokens, seen: list[int]) -> None:
    seen[0] += len(tokens.starts) - 1
    seen[1] += int(tokens.starts[-1])


def _ready(waiting: deque[tuple[int, Future[Tokens]]], seen: list[int]) -> Window:
    first, future = waiting.popleft()
    tokens = future.result()
    if first:  # the first has been counted
        _count(tokens, seen)
    return Window(first, tokens)
