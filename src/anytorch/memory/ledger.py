"""Track who holds how many bytes at which level, and refuse what exceeds a budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from anytorch.errors import BudgetTooSmall
from anytorch.memory.sizes import words


@dataclass(frozen=True)
class LevelUse:
    capacity: int
    used: int
    peak: int


class Ledger:
    """Bytes per level and holder; thread-safe. A reservation comes before the allocation, so no budget is ever exceeded.

    >>> from anytorch.memory.ledger import Ledger
    >>> ledger = Ledger({"device": 100})
    >>> ledger.reserve("device", "ring", 60)
    >>> ledger.free("device")
    40
    """

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacity = dict(capacities)
        self._held: dict[str, dict[str, int]] = {level: {} for level in capacities}
        self._used = dict.fromkeys(capacities, 0)
        self._peak = dict.fromkeys(capacities, 0)
        self._lock = threading.Lock()

    def reserve(self, level: str, holder: str, nbytes: int) -> None:
        """Take bytes for a holder that has none there yet. Raises BudgetTooSmall, with nothing changed."""
        with self._lock:
            assert holder not in self._held[level], f"{holder} already holds bytes at {level}"
            self._set(level, holder, nbytes)

    def resize(self, level: str, holder: str, nbytes: int) -> None:
        """What a holder has there becomes `nbytes`, in one step: nobody else gets its room in between. Raises
        BudgetTooSmall, with nothing changed."""
        with self._lock:
            self._set(level, holder, nbytes)

    def _set(self, level: str, holder: str, nbytes: int) -> None:
        used = self._used[level] - self._held[level].get(holder, 0)
        if used + nbytes > self._capacity[level]:
            raise BudgetTooSmall(
                f"{holder} needs {words(nbytes)} at level {level}, where {words(used)} of "
                f"{words(self._capacity[level])} are used",
                hint=f"a {level} budget of {used + nbytes} bytes would hold it",
            )
        self._held[level][holder] = nbytes
        self._used[level] = used + nbytes
        self._peak[level] = max(self._peak[level], self._used[level])

    def release(self, level: str, holder: str) -> int:
        """Give a holder's bytes back; 0 when it held none, so that cleaning up twice does no harm."""
        with self._lock:
            nbytes = self._held[level].pop(holder, 0)
            self._used[level] -= nbytes
            return nbytes

    @contextmanager
    def holding(self, level: str, holder: str, nbytes: int) -> Iterator[None]:
        """Reserve bytes for as long as the block runs."""
        self.reserve(level, holder, nbytes)
        try:
            yield
        finally:
            self.release(level, holder)

    def free(self, level: str) -> int:
        with self._lock:
            return self._capacity[level] - self._used[level]

    def use(self, level: str) -> LevelUse:
        with self._lock:
            return LevelUse(self._capacity[level], self._used[level], self._peak[level])

    def holders(self, level: str) -> dict[str, int]:
        with self._lock:
            return dict(self._held[level])

    def levels(self) -> tuple[str, ...]:
        return tuple(self._capacity)
