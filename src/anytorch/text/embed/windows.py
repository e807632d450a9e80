"""Read texts from any iterable a window at a time, tokenized one window ahead of the computation.

The iterable is drawn from in the caller's own thread (a database cursor may belong to it); only tokenizing, which
releases the GIL, happens beside. Memory is bounded: at most `AHEAD` windows exist besides the one being computed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from anytorch.errors import UsageError
from anytorch.text.embed.tokens import Tokens
from anytorch.values import dataclass
from anytorch.workers import Workers

if TYPE_CHECKING:
    from concurrent.futures import Future

FIRST_TEXTS = 64  # a small first window: the encoder starts sooner
MOST_TEXTS = 8192
MOST_CHARACTERS = 4_000_000  # of one window
AHEAD = 2
# For a device that waits for its first work: texts and characters of the first windows, each computed while the next, some
# three times as large, is tokenized. Those that follow double.
EARLY = ((128, 16_000), (512, 48_000), (1024, 120_000))


@dataclass(frozen=True)
class Window:
    first: int  # number of its first text
    tokens: Tokens

    @property
    def count(self) -> int:
        return len(self.tokens.starts) - 1


def chunks(
    texts: Iterable[str], size: Callable[[int], int], most_characters: Callable[[int], int] = lambda _: MOST_CHARACTERS
) -> Iterator[list[str]]:
    """Lists of texts; `size(number)` says how many the next one may hold. Bounded by characters too. Lazy."""
    source = iter(texts)
    number = 0
    left: list[str] = []
    while True:
        wanted = size(number)
        drawn = left + list(islice(source, max(0, wanted - len(left))))
        if not drawn:
            return
        cut = _within(drawn[:wanted], most_characters(number))
        yield drawn[:cut]
        left = drawn[cut:]
        number += 1


def _within(chunk: list[str], most: int) -> int:
    """How many texts of a chunk have at most so many characters together; one at least."""
    try:
        if sum(map(len, chunk)) <= most:  # nearly always
            return len(chunk)
        ends = list(accumulate(map(len, chunk)))
    except TypeError:  # not all are texts: whoever tokenizes them says so
        ends = list(accumulate(len(text) if isinstance(text, str) else 0 for text in chunk))
    return max(1, bisect_right(ends, most))


def windows(
    texts: Iterable[str],
    tokenize: Callable[[list[str], int], Tokens],
    *,
    target_tokens: Callable[[], int],
    workers: int = 1,
    known: int | None = None,
    early: Workers | None = None,
) -> Iterator[Window]:
    """Tokenized windows in order. `target_tokens()` is how many tokens a window should hold; `known` the number of texts.

    `early`, whose threads tokenize, is for a device that waits: the first window is tokenized at once, in the caller's own
    thread, with the second one under way beside it. Else `workers` threads are started for this call.
    """
    seen = [0, 0]  # texts and tokens so far: what an average text holds
    first_texts = EARLY[0][0] if early else FIRST_TEXTS

    def size(number: int) -> int:
        if early and number < len(EARLY):
            return EARLY[number][0]
        if number == 0 or not seen[0]:
            return first_texts
        average = max(1.0, seen[1] / seen[0])
        ramp = _early(number)[0] if early else first_texts << (2 * min(number, 8))
        return max(FIRST_TEXTS, min(MOST_TEXTS, ramp, int(target_tokens() / average)))

    def count(tokens: Tokens) -> None:
        seen[0] += len(tokens.starts) - 1
        seen[1] += int(tokens.starts[-1])

    def most_characters(number: int) -> int:
        return min(MOST_CHARACTERS, _early(number)[1]) if early else MOST_CHARACTERS

    first = 0
    pieces = chunks(texts, size, most_characters)
    with ExitStack() as stack:
        if known is not None and known <= FIRST_TEXTS:  # one window: no thread
            for piece in pieces:
                yield Window(first, tokenize(piece, first))
                first += len(piece)
            return
        waiting: deque[tuple[int, Future[Tokens]]] = deque()
        pool = early
        if pool is None:
            pool = stack.enter_context(Workers(workers, thread_name_prefix="anytorch-tokenize"))
        stack.callback(lambda: [future.cancel() for _, future in waiting])

        def begin(piece: list[str], number: int) -> None:
            try:
                waiting.append((number, pool.submit(tokenize, piece, number)))
            except RuntimeError as exc:  # it was shut down
                raise UsageError("the engine is closed") from exc

        def ready() -> Window:
            number, future = waiting.popleft()
            tokens = future.result()
            if number:  # the first has been counted
                count(tokens)
            return Window(number, tokens)

        own = next(pieces, None) if early else None
        if own is not None:
            first = len(own)
            following = next(pieces, None)
            if following is not None:
                begin(following, first)
                first += len(following)
            tokens = tokenize(own, 0)
            count(tokens)
            yield Window(0, tokens)
        for piece in pieces:
            begin(piece, first)
            if not seen[0]:
                count(waiting[0][1].result())  # what an average text holds sizes the windows that follow
            first += len(piece)
            if len(waiting) > AHEAD or (early and waiting[0][1].done()):  # a device is not kept waiting for the next
                yield ready()
        while waiting:
            yield ready()


def _early(number: int) -> tuple[int, int]:
    """Texts and characters that the window of this number may hold for a device that waits."""
    if number < len(EARLY):
        return EARLY[number]
    texts, characters = EARLY[-1]
    doublings = min(number - len(EARLY) + 1, 16)
    return texts << doublings, characters << doublings


def full_chunks(source: Iterable[Window], chunk_tokens: int) -> Iterator[Window]:
    """The same texts in windows that fill whole chunks of so many tokens; what is left over begins the next window.

    A chunk that is half empty takes a GPU nearly as long as a full one. The first windows stay as they are: they only
    have to be early.
    """
    left: Window | None = None
    for number, window in enumerate(source):
        if left is not None:
            window, left = Window(left.first, Tokens.joined([left.tokens, window.tokens])), None
        if number >= len(EARLY):
            count = fill_count(window.tokens, chunk_tokens)
            window, left = _split(window, count)
        if window.count:
            yield window
    if left is not None:
        yield left


def fill_count(tokens: Tokens, chunk_tokens: int) -> int:
    """How many of the texts, from the first, fill whole chunks; all of them where no chunk is sure to hold two texts."""
    longest = int(tokens.lengths.max(initial=1))
    sure = chunk_tokens - longest + 1  # tokens that a chunk holds at least before the next text does not fit
    if sure < longest:
        return len(tokens.starts) - 1
    whole = int(tokens.starts[-1]) // sure * sure
    return int(tokens.starts[1:].searchsorted(whole, side="right"))


def _split(window: Window, count: int) -> tuple[Window, Window | None]:
    if count == window.count:
        return window, None
    tokens = window.tokens
    # How many of which half were cut is not known, nor asked: they are counted with the first that has any text.
    before = tokens.part(0, count, tokens.truncated if count else 0)
    after = tokens.part(count, window.count, 0 if count else tokens.truncated)
    return Window(window.first, before), Window(window.first + count, after)
