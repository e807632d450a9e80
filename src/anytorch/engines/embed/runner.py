"""Tokenized texts through an encoder: sorted by length, cut into batches, timed, and made to fit into memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anytorch import logs
from anytorch.devices.oom import fit_batch, is_out_of_memory
from anytorch.engines.embed.budget import Budget, Work
from anytorch.engines.embed.protocol import AsyncEncoder, Encoder, batches
from anytorch.engines.embed.tokens import Tokens
from anytorch.engines.embed.turns import Turns
from anytorch.errors import OutOfMemory

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Store = Callable[[npt.NDArray[np.intp], npt.NDArray[np.float32]], None]

log = logs.logger(__name__)


class Runner:
    """One encoder and the batches it is given. Thread-safe: batches of concurrent callers take turns.

    `smaller()` is asked for an encoder that needs less memory when one text alone does not fit; None: there is none.
    """

    def __init__(
        self, encoder: Encoder, budget: Budget, work: Work, *, smaller: Callable[[], Encoder | None] = lambda: None
    ) -> None:
        self.encoder = encoder
        self.budget = budget
        self.notes: list[str] = []  # what was done about memory, for explain()
        self._work = work
        self._smaller = smaller
        self._lock = Turns()
        self._closed = False

    def run(self, tokens: Tokens, store: Store) -> None:
        """Encode all texts; `store(places, pooled)` gets each batch's rows and which texts they are, in any order."""
        import numpy as np

        lengths = tokens.lengths
        # The longest first: if memory does not suffice, that shows at once; and padding, where there is any, is least.
        order = np.argsort(-lengths, kind="stable")
        if isinstance(self.encoder, AsyncEncoder):
            with self._lock:
                self._run_ahead(tokens, order, store)
            return
        at = 0
        while at < len(order):
            with self._lock:  # one batch at a time: another caller's turn may come in between
                self._check_open()
                count = self._next(lengths[order[at:]])
                places = order[at : at + count]
                ids, starts = pack(tokens, places)
                pooled = self._timed(ids, starts)
            store(places, pooled)
            at += count

    def run_packed(self, ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """One batch as it is (the queue makes its own), split only if memory asks for it."""
        with self._lock:
            self._check_open()
            return self._timed(ids, starts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.encoder.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _next(self, lengths: npt.NDArray[np.int32]) -> int:
        """How many of the next texts make one batch."""
        # No more than budget texts can fit (each has a token at least), so that the rest need not be looked at.
        some = lengths[: self.budget.tokens].tolist()
        return len(batches(some, self.budget.tokens, padded=self.encoder.padded)[0])

    def _timed(self, ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        began = time.perf_counter()
        try:
            pooled = self.encoder.run(ids, starts)
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            exc.__traceback__ = None  # its frames hold the tensors of the attempt
            return self._smaller_batches(ids, starts)
        self._record(starts, time.perf_counter() - began)
        return pooled

    def _record(self, starts: npt.NDArray[np.int32], seconds: float) -> None:
        import numpy as np

        lengths = (starts[1:] - starts[:-1]).astype(np.int64)
        pairs = int((lengths * lengths).sum())
        filled = int(lengths.max()) * len(lengths) if self.encoder.padded else int(starts[-1])
        self.budget.record(filled, self._work.amount(int(starts[-1]), pairs), seconds)

    def _run_ahead(self, tokens: Tokens, order: npt.NDArray[np.intp], store: Store) -> None:
        """As `run`, with the next batch sent before the last one's answer is fetched."""
        self._check_open()
        encoder: Any = self.encoder
        lengths = tokens.lengths
        under_way: deque[tuple[Any, Any, Any, Any]] = deque()
        last = time.perf_counter()
        at = 0
        while at < len(order) or under_way:
            if at < len(order) and len(under_way) <= encoder.in_flight:
                count = self._next(lengths[order[at:]])
                places = order[at : at + count]
                ids, starts = pack(tokens, places)
                under_way.append((places, ids, starts, self._submitted(encoder, ids, starts)))
                at += count
                continue
            places, ids, starts, pending = under_way.popleft()
            pooled = self._fetched(pending, ids, starts)
            now = time.perf_counter()
            self._record(starts, now - last)  # in a full pipe, the time between two answers is that of a batch
            last = now
            store(places, pooled)

    def _submitted(self, encoder: Any, ids: Any, starts: Any) -> Any:
        try:
            return encoder.submit(ids, starts)
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            return None  # tried again, smaller, when its turn comes and the others have left

    def _fetched(self, pending: Any, ids: Any, starts: Any) -> npt.NDArray[np.float32]:
        if pending is not None:
            try:
                pooled: npt.NDArray[np.float32] = pending.result()
            except Exception as exc:
                if not is_out_of_memory(exc):
                    raise
                exc.__traceback__ = None
            else:
                return pooled
        return self._smaller_batches(ids, starts)

    def _smaller_batches(self, ids: npt.NDArray[np.int32], starts: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """The batch in halves, quarters, … until each part fits. Raises OutOfMemory when one text alone does not."""
        lengths = (starts[1:] - starts[:-1]).tolist()
        total, longest = int(starts[-1]), max(lengths)

        def attempt(tokens: int) -> npt.NDArray[np.float32]:
            import numpy as np

            parts = [
                self.encoder.run(ids[starts[b.start] : starts[b.stop]], starts[b.start : b.stop + 1] - starts[b.start])
                for b in batches(lengths, tokens, padded=self.encoder.padded)
            ]
            return np.concatenate(parts)

        try:
            fit = fit_batch(attempt, max(longest, total // 2), minimum=longest)
        except OutOfMemory as exc:
            return self._smaller_encoder(ids, starts, exc)
        self.budget.lower(fit.batch)
        note = f"memory ran out with {total} tokens in a batch; {fit.batch} fit"
        if note not in self.notes:
            self.notes.append(note)
            log.warning("%s", note)
        return fit.result

    def _smaller_encoder(self, ids: Any, starts: Any, exc: OutOfMemory) -> npt.NDArray[np.float32]:
        longest = int((starts[1:] - starts[:-1]).max())
        replacement = self._smaller()
        if replacement is None:
            raise OutOfMemory(
                f"a single text of {longest} tokens does not fit into the device's memory: {exc.message}",
                hint="set max_length, use quantization='int8' (or allow_quantize=True), a smaller model, or device='cpu'",
            ) from exc
        self.encoder.close()
        self.encoder = replacement
        return self._timed(ids, starts)


def pack(tokens: Tokens, places: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The ids of the texts at `places`, one after the other, and where each starts."""
    import numpy as np

    begins, lengths = tokens.starts[places], tokens.lengths[places]
    starts = np.zeros(len(places) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    # For each token of the result: its place within its text plus where that text begins.
    index = np.arange(int(starts[-1]), dtype=np.int32) + np.repeat(begins - starts[:-1], lengths)
    return tokens.ids[index], starts
