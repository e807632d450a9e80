"""Find the best number of tokens per batch by timing real batches, and store it.

Nothing is computed only to be timed. A batch's time is divided by its work (products and attention, counted), so that
batches of short and long texts can be compared.
"""

from __future__ import annotations

from typing import Any

from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Trial, Verdict, fastest
from anytorch.text.checkpoints.spec import EncoderSpec
from anytorch.values import dataclass

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

    Starts at `start`, doubles while that pays, tries halving if doubling did not, then stays and is remembered as the
    answer to `asked`. Never goes below `smallest` by itself; `limit` is what memory has been seen not to allow, in this
    process. With `search=False` it stays at `start`, but for what memory does not allow.
    """

    def __init__(
        self,
        start: int,
        *,
        asked: Question | None = None,
        fixed: bool = False,
        smallest: int = SMALLEST,
        search: bool = True,
    ) -> None:
        self.tokens = start
        self.smallest = smallest
        self.limit = LARGEST
        self.asked = asked
        self.settled = fixed or not search
        self.source = "given" if fixed else "default" if search else "whole chunks of the encoder's"
        self._rates: dict[int, list[float]] = {}
        if not fixed and asked is not None and (known := recall(asked)) is not None:
            self.tokens, self.settled, self.source = int(known.chosen), True, "remembered"

    def record(self, tokens: int, work: float, seconds: float) -> None:
        """Record one batch's time; batches far below the budget are ignored."""
        if self.settled or seconds <= 0 or tokens < 0.6 * self.tokens:
            return
        here = self._rates.setdefault(self.tokens, [])
        here.append(work / seconds)
        if len(here) >= SAMPLES:
            self._step()

    def _step(self) -> None:
        trials = [
            Trial(str(size), 1.0 / max(rates), repeats=len(rates))  # seconds for one multiply-add
            for size, rates in sorted(self._rates.items())
            if len(rates) >= SAMPLES
        ]
        name, why = fastest(trials, noise=GAIN - 1)
        tried, chosen = [int(one.name) for one in trials], int(name)
        larger, smaller = chosen * 2, chosen // 2
        if larger not in tried and larger <= self.limit and chosen == tried[-1]:
            self.tokens = larger
        elif smaller not in tried and smaller >= self.smallest and chosen == tried[0]:
            self.tokens = smaller
        else:
            self.tokens, self.settled, self.source = chosen, True, "measured"
            if self.asked is not None:
                remember(Verdict(self.asked, tuple(trials), name, why))

    def lower(self, tokens: int) -> None:
        """Lower the budget to the number of tokens that fitted in memory.

        Not remembered: who else uses the memory now may be gone when the next process starts.
        """
        self.limit = tokens
        self.tokens = min(self.tokens, self.limit)
        self._rates = {size: rates for size, rates in self._rates.items() if size <= self.limit}
        self.settled, self.source = True, "lowered: memory ran out above it"

    def describe(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "source": self.source if self.settled else f"{self.source}, being measured"}
