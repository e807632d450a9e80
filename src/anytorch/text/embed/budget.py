"""Find the best number of tokens per batch by timing real batches, and store it.

Nothing is computed only to be timed. A batch's time is divided by its work (products and attention, counted), so that
batches of short and long texts can be compared.
"""

from __future__ import annotations

from typing import Any

from anytorch import logs
from anytorch.cache import Store
from anytorch.errors import CacheError
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.values import dataclass

log = logs.logger(__name__)

SMALLEST, LARGEST = 256, 1 << 20
SAMPLES = 3  # timings of one size; the best counts, since a busy machine only ever makes one slower
GAIN = 1.04  # a larger batch must be this much faster: it costs memory and delays the first answer


@dataclass(frozen=True)
class Work:
    """Multiply-adds of an encoder: `per_token` for each token, and `per_pair` for each pair that attends."""

    per_token: int
    per_pair: int

    @staticmethod
    def of(spec: EncoderSpec) -> Work:
        across = spec.head_width * (2 * spec.heads + 2 * spec.kv_heads)
        linear = spec.width * across + spec.width * spec.inner * (3 if spec.gated else 2)
        return Work(spec.layers * linear, spec.layers * 2 * spec.heads * spec.head_width)

    def amount(self, tokens: int, pairs: int) -> float:
        """`pairs` is the sum of the squared lengths."""
        return float(tokens * self.per_token + pairs * self.per_pair)


class Budget:
    """The number of tokens per batch, and the search for it. Not thread-safe: its owner holds a lock.

    Starts at `start`, doubles while that pays, tries halving if doubling did not, then stays and is remembered under
    `key`. Never goes below `smallest` by itself; `limit` is what memory has been seen not to allow. With `search=False`
    it stays at `start`, but for what memory does not allow.
    """

    def __init__(
        self, start: int, *, key: str = "", fixed: bool = False, smallest: int = SMALLEST, search: bool = True
    ) -> None:
        self.tokens = start
        self.smallest = smallest
        self.limit = LARGEST
        self.key = key
        self.settled = fixed or not search
        self.source = "given" if fixed else "default" if search else "whole chunks of the encoder's"
        self._rates: dict[int, list[float]] = {}
        if not fixed and key and (known := _recall(key)) is not None:
            self.tokens, self.settled, self.source = known, True, "remembered"

    def record(self, tokens: int, work: float, seconds: float) -> None:
        """Record one batch's time; batches far below the budget are ignored."""
        if self.settled or seconds <= 0 or tokens < 0.6 * self.tokens:
            return
        here = self._rates.setdefault(self.tokens, [])
        here.append(work / seconds)
        if len(here) >= SAMPLES:
            self._step()

    def _step(self) -> None:
        best = {size: max(rates) for size, rates in self._rates.items() if len(rates) >= SAMPLES}
        sizes = sorted(best)
        chosen = sizes[0]
        for size in sizes[1:]:
            if best[size] > best[chosen] * GAIN:
                chosen = size
        larger, smaller = chosen * 2, chosen // 2
        if larger not in best and larger <= self.limit and chosen == sizes[-1]:
            self.tokens = larger
        elif smaller not in best and smaller >= self.smallest and chosen == sizes[0]:
            self.tokens = smaller
        else:
            self.tokens, self.settled, self.source = chosen, True, "measured"
            log.info("batches of %d tokens are the fastest here: %s", chosen, {k: f"{v:.3g}" for k, v in best.items()})
            _keep(self.key, chosen)

    def lower(self, tokens: int) -> None:
        """Lower the budget to the number of tokens that fitted in memory."""
        self.limit = tokens
        self.tokens = min(self.tokens, self.limit)
        self._rates = {size: rates for size, rates in self._rates.items() if size <= self.limit}
        self.settled, self.source = True, "lowered: memory ran out above it"
        _keep(self.key, self.tokens)

    def describe(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "source": self.source if self.settled else f"{self.source}, being measured"}


def _recall(key: str) -> int | None:
    try:
        stored = Store("embed-batches").get(key)
    except CacheError as exc:
        log.warning("%s", exc.message)
        return None
    return stored if isinstance(stored, int) and 1 <= stored <= LARGEST else None


def _keep(key: str, tokens: int) -> None:
    if not key:
        return
    try:
        Store("embed-batches").put(key, tokens, keep=1000)
    except CacheError as exc:
        log.warning("%s", exc.message)
