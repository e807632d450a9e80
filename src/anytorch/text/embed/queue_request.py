"""One request to the queue: what it asks for and how far it is; and what the queue needs of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from anytorch.text.embed.sharing import Share
from anytorch.text.embed.tokens import Tokens

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Engine(Protocol):
    """What the queue needs of an ArrowEngine."""

    @property
    def batch_tokens(self) -> int: ...

    def tokenize(self, texts: list[str], *, prompt: str | None = None) -> Tokens: ...

    @property
    def batches_ahead(self) -> int: ...

    def start_tokens(self, tokens: Tokens) -> Callable[[], npt.NDArray[np.float32]]: ...

    def finish(self, pooled: npt.NDArray[np.float32], dim: int | None, precision: str) -> npt.NDArray[Any]: ...

    def check_request(self, dim: int | None, precision: str, output: str) -> tuple[int, str]: ...

    def as_output(self, vectors: npt.NDArray[Any], output: str) -> Any: ...


@dataclass(eq=False)
class Request:
    tokens: Tokens
    lengths: list[int]
    rows: npt.NDArray[Any]
    single: bool
    dim: int | None
    precision: str
    output: str
    arrived: float
    deadline: float | None
    future: Future[Any] = field(default_factory=Future)
    taken: int = 0  # texts handed to the encoder
    left: int = 0  # texts without an answer
    waiting_tokens: int = 0  # of the texts not handed over yet
    entered: bool = False  # there was room for it
    finished: bool = False  # somebody answers it, or nobody has to: see `claim`

    def claim(self) -> bool:
        """Claim the right to resolve it (lock held): True for the first caller. Until then the future can still be
        cancelled.

        The answer itself is set after the lock: it calls what others have hung on the future, and that may need a lock
        whose holder is about to call `submit`.
        """
        if self.finished:
            return False
        self.finished = True
        return self.future.set_running_or_notify_cancel()

    def timed_out(self) -> TimeoutError:
        assert self.deadline is not None
        seconds = self.deadline - self.arrived
        if self.entered:
            return TimeoutError(f"not computed within {seconds:.3g} s")
        return TimeoutError(f"the queue stayed full until the request's time was up ({seconds:.3g} s)")


Batch = list[tuple[Request, Share]]


def make_request(
    engine: Engine,
    tokens: Tokens,
    single: bool,
    dim: int | None,
    precision: str,
    output: str,
    timeout_s: float | None,
) -> Request:
    """Make a checked request. Raises UsageError for invalid options."""
    import numpy as np

    columns, dtype = engine.check_request(dim, precision, output)
    count = len(tokens.starts) - 1
    now = time.monotonic()
    return Request(
        tokens,
        tokens.lengths.tolist(),
        np.empty((count, columns), dtype),
        single,
        dim,
        precision,
        output,
        now,
        None if timeout_s is None else now + timeout_s,
        left=count,
        waiting_tokens=int(tokens.starts[-1]),
    )


def tokens_of(batch: Batch) -> list[int]:
    """How many tokens of each request are in a batch."""
    return [sum(request.lengths[share.begin : share.end]) for request, share in batch]


def joined(batch: Batch) -> Tokens:
    """The texts of a batch as one packed array."""
    import numpy as np

    ids, lengths = [], []
    for request, share in batch:
        starts = request.tokens.starts
        ids.append(request.tokens.ids[starts[share.begin] : starts[share.end]])
        lengths.append(np.diff(starts[share.begin : share.end + 1]))
    starts = np.zeros(sum(map(len, lengths)) + 1, np.int32)
    np.cumsum(np.concatenate(lengths), out=starts[1:])
    truncated = sum(request.tokens.truncated for request, share in batch if share.begin == 0)
    return Tokens(np.concatenate(ids), starts, truncated)
