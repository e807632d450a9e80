"""How small and how large a number may be: one table for the command line, for HTTP and for Python.

Without an upper limit a slip of the finger is obeyed: 40,000 threads are started, a tensor of 10**12 rows is asked for. The
limits are far beyond what helps anybody; memory and time set closer ones, which are told when they are met.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

from anytorch.errors import UsageError


class Limit(NamedTuple):
    """The numbers from `least` to `most`, whole ones unless `whole` is False; `above`: `least` itself is not one of them."""

    least: float
    most: float
    whole: bool = True
    above: bool = False

    @property
    def words(self) -> str:
        """What to use, for an error."""
        if self.whole:
            return f"use a whole number from {self.least:,} to {self.most:,}"
        low = f"above {self.least:g} and up" if self.above else f"from {self.least:g}"
        return f"use a number {low} to {self.most:,g}"

    def holds(self, number: float) -> bool:
        low = number > self.least if self.above else number >= self.least
        return low and number <= self.most  # NaN is neither

    def parse(self, text: str) -> int | float:
        """The number that a text says. Raises ValueError with the words for an error."""
        try:
            number: int | float = int(text) if self.whole else float(text)
        except (ValueError, OverflowError):  # also more digits than Python reads
            number = math.nan
        if not self.holds(number):
            shown = text if len(text) <= 40 else f"{text[:37]}…"
            raise ValueError(f"{shown}: {self.words}")
        return number

    def check(self, name: str, value: Any) -> Any:
        """The value as an int or a float, NumPy's numbers included. Raises UsageError that names the argument."""
        try:
            if isinstance(value, (bool, str)):
                raise TypeError
            number = operator.index(value) if self.whole else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not self.holds(number):
            raise UsageError(f"{name}={value!r} is invalid: {self.words}")
        return number

    @property
    def field(self) -> dict[str, float]:
        """As pydantic's Field takes it."""
        return {"gt" if self.above else "ge": self.least, "le": self.most}


MILLION, BILLION = 10**6, 10**9

# of a machine
THREADS = Limit(1, 1024)
PROCESSES = Limit(1, 256)
PORT = Limit(0, 65_535)
SECONDS = Limit(0, 86_400, whole=False, above=True)
SECONDS_OR_NONE = Limit(0, 86_400, whole=False)  # 0: none
ROUNDS = Limit(1, MILLION)  # timed runs of a case, training steps of a demo
# of a model's work
BATCH = Limit(1, 65_536)
LENGTH = Limit(1, MILLION)  # tokens of a text, rows of a window
WIDTH = Limit(1, 65_536)
DIMENSIONS = Limit(1, MILLION)
BATCH_TOKENS = Limit(1, 16 * MILLION)
HITS = Limit(1, 100_000)  # of a search
NEW_TOKENS = Limit(1, MILLION)
KERNEL_ROWS = Limit(1, 1024)  # texts that one kernel decodes at once
SEED = Limit(0, 2**63 - 1)
TEMPERATURE = Limit(0, 100, whole=False)
TEMPERATURE_ABOVE_ZERO = Limit(0, 100, whole=False, above=True)
TOP_K = Limit(0, BILLION)  # 0: all
SHARE = Limit(0, 1, whole=False, above=True)
# of forecasts: the paths are kept whole for their quantiles
STEPS = Limit(1, 10_000)
PATHS = Limit(1, 10_000)
WINDOW = Limit(2, MILLION)
QUANTILE = Limit(0, 1, whole=False)
ROWS = Limit(1, BILLION)
PRICE = Limit(0, 10**12, whole=False, above=True)
# of training
COUNT = Limit(1, BILLION)
COUNT_OR_NONE = Limit(0, BILLION)  # 0: none, or all
LEARNING_RATE = Limit(0, 1000, whole=False, above=True)
DECAY = Limit(0, 1000, whole=False)
PART = Limit(0, 1, whole=False)
RANK = Limit(0, 65_536)
SCALE = Limit(0, MILLION, whole=False)  # of an adapter, of a gradient's length
SCALE_ABOVE_ZERO = Limit(0, MILLION, whole=False, above=True)
# of the service
REQUESTS_PER_SECOND = Limit(0, 10 * MILLION, whole=False, above=True)
