"""One request for text: what it asks for, where it stands, and the events that go from the worker to whoever reads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from anytorch.text.generate.sampling import Sampling

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """A token, and when (time.perf_counter) it was known."""

    id: int
    moment: float


@dataclass(frozen=True)
class End:
    """No more tokens: why, or the error that ended it."""

    reason: FinishReason
    error: BaseException | None = None


Event = Token | End


class Mailbox:
    """Events of one request, from the worker's thread to one reader: a thread that waits, or an event loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()
            wake = self._wake
        if wake is not None:
            wake()

    def get(self) -> Event:
        """The next one; waits for it."""
        with self._changed:
            while not self._events:
                self._changed.wait()
            return self._events.popleft()

    def get_now(self) -> Event | None:
        with self._changed:
            return self._events.popleft() if self._events else None

    def call(self, wake: Callable[[], None] | None) -> None:
        """From now on call this, from the worker's thread, when something has come."""
        with self._changed:
            self._wake = wake
            waiting = bool(self._events)
        if waiting and wake is not None:
            wake()


@dataclass(eq=False)
class Request:
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
    cache: Any = None
    row: int = 0  # in the cache, which it may share
    length: int = 0  # tokens whose keys and values are in the cache

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def made(self) -> int:
        """How many new tokens there are."""
        return len(self.tokens) - self.prompt_length

    @property
    def reading(self) -> bool:
        """Is some of the prompt still to be computed, apart from its last token?"""
        return len(self.tokens) - self.length > 1 or self.cache is None

    def end(self, reason: FinishReason, error: BaseException | None = None) -> None:
        self.cache = None  # the memory is free from now on, however long somebody holds the request
        self.mailbox.put(End(reason, error))
