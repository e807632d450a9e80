"""What an engine has done so far, counted by whoever computes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from anytorch import logs
from anytorch.counts import counted
from anytorch.text.embed.tokens import Tokens

log = logs.logger(__name__)


@dataclass(frozen=True)
class EncodeStats:
    """What an engine has done so far. `truncated` texts were longer than `max_length` tokens and were cut there."""

    texts: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0

    def plus(self, tokens: Tokens, seconds: float) -> EncodeStats:
        return EncodeStats(
            self.texts + len(tokens.starts) - 1,
            self.tokens + int(tokens.starts[-1]),
            self.truncated + tokens.truncated,
            self.seconds + seconds,
        )


class Counting:
    """Thread-safe."""

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._lock = threading.Lock()
        self.stats = EncodeStats()

    def __call__(self, tokens: Tokens, seconds: float) -> None:
        with self._lock:
            self.stats = self.stats.plus(tokens, seconds)
        if tokens.truncated:
            log.info("%s had more than %d tokens: truncated", counted(tokens.truncated, "text"), self._max_length)
