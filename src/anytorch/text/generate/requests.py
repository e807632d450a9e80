"""One request for text: what it asks for, where it stands, and the events that go from the worker to whoever reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Protocol

from anytorch.text.decoders.choosing import Choice, Points
from anytorch.text.generate.sampling import Sampling

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Tokens:
    """Tokens that were computed in one call, and when (time.perf_counter) the first and the last of them were known."""

    ids: tuple[int, ...]
    first: float
    last: float


@dataclass(frozen=True)
class End:
    """No more tokens: why, or the error that ended it."""

    reason: FinishReason
    error: BaseException | None = None


Event = Tokens | End


class Mailbox:
    """Events of one request, from the worker's thread to one reader: a thread that waits, or an event loop."""

    def __init__(self) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._wake: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        self._events.put(event)
        if (wake := self._wake) is not None:
            wake()

    def get(self) -> Event:
        """The next one; waits for it."""
        return self._events.get()

    def get_now(self) -> Event | None:
        try:
            return self._events.get_nowait()
        except Empty:
            return None

    def call(self, wake: Callable[[], None] | None) -> None:
        """From now on call this, from the worker's thread, when something has come; at once if something has."""
        self._wake = wake
        if wake is not None and not self._events.empty():
            wake()


@dataclass(eq=False)
class TextRequest:
    """`tokens` are the prompt's, then the new ones. The worker alone changes what is below the line."""

    tokens: list[int]
    sampling: Sampling
    max_tokens: int
    ends: frozenset[int]  # tokens that end the text and are no part of it
    random: torch.Generator
    deadline: float | None = None  # time.perf_counter
    mailbox: Mailbox = field(default_factory=Mailbox)
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False  # set by the reader; the worker looks before every token
    # --------------------------------------------------------------------------------------------------------------
    prompt_length: int = 0
    cache: Any = None  # what has its keys and values; None while nothing has
    row: int = 0  # in there: others may be, too
    length: int = 0  # tokens whose keys and values are in the cache

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.points = Points(self.random)

    @property
    def made(self) -> int:
        """How many new tokens there are."""
        return len(self.tokens) - self.prompt_length

    @property
    def reading(self) -> bool:
        """Whether some of the prompt is still to be computed, apart from its last token."""
        return len(self.tokens) - self.length > 1 or self.cache is None

    @property
    def choice(self) -> Choice:
        """How its tokens are chosen; the penalty for repeated ones, which depends on the text, is not in it."""
        asked, left = self.sampling, self.max_tokens - self.made
        return Choice(asked.temperature, asked.top_k, asked.top_p, self.points.ahead, self.ends, left)

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        self.mailbox.put(End(reason, error))


Computed = tuple[int, "torch.Tensor | None"]  # how many tokens of each request; logits, where there is one to choose


class Way(Protocol):
    """How tokens are computed: used by the scheduler's worker only."""

    def read(self, request: TextRequest, portion: int) -> Computed:
        """Go on with the prompt by at most a portion. The one with its last token gives logits, [1, vocabulary], else None.
        0 tokens: it has to wait until others leave."""

    def together(self, requests: Sequence[TextRequest]) -> list[TextRequest]:
        """Those of them that can share a step."""

    def step(self, requests: Sequence[TextRequest]) -> Computed:
        """One token for each of these, which share a step: logits, [requests, vocabulary]."""

    def several(self, requests: Sequence[TextRequest], most: int) -> list[list[int]] | None:
        """Up to so many tokens for each of these in one call, chosen as they ask; less than one where the model has computed
        no number, which ends a list. None: they can only be computed one by one."""

    def tokens(self, requests: Sequence[TextRequest]) -> Generator[list[int], None, None] | None:
        """One token for each of these again and again, as they ask for it, until it is closed: before requests come or go.
        None where tokens are chosen from logits, step by step."""

    def undo(self, requests: Sequence[TextRequest]) -> None:
        """A step of these has failed: what it may have left behind is removed."""

    def leave(self, request: TextRequest) -> None:
        """The request has ended: its memory is free from now on, however long others hold it."""

    def close(self) -> None:
        """Let go of the model. All requests have ended."""
