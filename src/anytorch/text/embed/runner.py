"""Run tokenized texts through an encoder: sorted by length, cut into batches, timed, and fitted to memory."""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from anytorch import logs
from anytorch.devices.oom import fit_batch, is_out_of_memory
from anytorch.errors import OutOfMemory, UsageError
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Trial, Verdict, fastest
from anytorch.recorded.moves import gather_by_index, gather_texts
from anytorch.text.checkpoints.checkpoint import Floats, Ints
from anytorch.text.embed.protocol import AsyncEncoder, Encoder, batches
from anytorch.text.embed.tokens import Tokens

Work = Callable[[int, int], float]  # multiply-adds for so many tokens and pairs of them: `EncoderSpec.work`
Replace = Callable[[Encoder], tuple[Encoder, bool]]
Store = Callable[[npt.NDArray[np.intp], "Floats | None"], None]

log = logs.logger(__name__)

SMALLEST, LARGEST = 256, 1 << 20
SAMPLES = 3  # timings of one size; the best counts, since a busy machine only ever makes one slower
GAIN = 1.04  # a larger batch must be this much faster: it costs memory and delays the first answer


@dataclass(frozen=True)
class EncodeJob:
    """Texts to encode. `store(places, pooled)` gets each batch's rows and which texts they are, in any order.

    Where `into` is given (float32[texts, width], for vectors that need nothing more done to them), an encoder that can
    writes them there itself, and `store` is called without them.
    """

    tokens: Tokens
    store: Store
    into: Floats | None = None


class Runner:
    """One encoder and the batches it is given. Thread-safe: batches of concurrent callers take turns.

    `replace(encoder)` is asked for one that needs less memory when one text alone does not fit: it gives the encoder to go
    on with, and whether that one is smaller. It may close the old one first.
    """

    def __init__(
        self, encoder: Encoder, budget: Budget, work: Work, *, replace: Replace = lambda encoder: (encoder, False)
    ) -> None:
        self.encoder = encoder
        self.budget = budget
        self.notes: list[str] = []  # what was done about memory, for explain()
        self._work = work
        self._replace = replace
        self._replaced: Encoder | None = None  # closed, or about to be; None: the one in use is as it was
        self._lock = FairLock()
        self._counting = threading.Lock()
        self._closed = False

    def run(self, job: EncodeJob) -> None:
        """Encode all texts of a job."""
        for _ in self.stream([job]):
            pass

    def stream(self, jobs: Iterable[EncodeJob]) -> Iterator[EncodeJob]:
        """Encode one job after the other; each is handed back when it is done. Draws the next one early enough."""
        if isinstance(self.encoder, AsyncEncoder):
            return self._ahead(jobs)
        return self._one_by_one(jobs)

    def start_packed(self, ids: Ints, starts: Ints) -> Callable[[], Floats]:
        """One batch as it is (the queue makes its own), split only if memory asks for it; calling the result waits for it.

        An encoder that can begins at once, the others when the answer is asked for.
        """
        ahead = isinstance(self.encoder, AsyncEncoder)
        if ahead:
            self._check_open()
            batch = self._sent(ids, starts)

        def answer() -> Floats:
            if ahead:
                pooled = self._fetched(batch)
                assert pooled is not None
                return pooled
            with self._lock:
                self._check_open()
                return self._timed(ids, starts)

        return answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.encoder.close()
            # A method of the engine: kept, the two would hold each other and the weights.
            self._replace = lambda encoder: (encoder, False)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed")

    def _one_by_one(self, jobs: Iterable[EncodeJob]) -> Iterator[EncodeJob]:
        for job in jobs:
            order, lengths = longest_first(job.tokens)
            at = 0
            while at < len(order):
                with self._lock:  # one batch at a time: another caller's turn may come in between
                    self._check_open()
                    places = order[at : at + self._next(lengths[at:])]
                    pooled = self._timed(*gather_by_index(job.tokens.ids, job.tokens.starts, places))
                job.store(places, pooled)
                at += len(places)
            yield job

    def _ahead(self, jobs: Iterable[EncodeJob]) -> Iterator[EncodeJob]:
        """The next batches are sent, of the next job too, before the last one's answer is fetched.

        Holds no lock: such an encoder takes batches from several threads itself.
        """
        direct = _takes_places(type(self.encoder))
        under_way: deque[tuple[_Sent, EncodeJob, npt.NDArray[np.intp], bool]] = deque()  # with True for the job's last
        clock = time.perf_counter()

        def collected() -> Iterator[EncodeJob]:
            nonlocal clock
            batch, job, places, last = under_way.popleft()
            pooled = self._fetched(batch)
            now = time.perf_counter()
            self._record(batch.starts, now - clock)  # in a full pipe, the time between two answers is that of a batch
            clock = now
            job.store(places, pooled)
            if last:
                yield job

        for job in jobs:
            order, lengths = longest_first(job.tokens)
            into = job.into if direct else None
            at = 0
            while at < len(order):
                self._check_open()
                places = order[at : at + self._next(lengths[at:])]
                batch = self._sent(*gather_texts(job.tokens.ids, job.tokens.starts, places), into, places)
                at += len(places)
                under_way.append((batch, job, places, at == len(order)))
                while len(under_way) > batch.encoder.in_flight:
                    yield from collected()
            if not len(order):
                yield job
        while under_way:
            yield from collected()

    def _next(self, lengths: Ints) -> int:
        """How many of the next texts, which come longest first, make one batch: `protocol.batches`, for the first only."""
        budget = self.budget.tokens
        chunk = getattr(self.encoder, "chunk_tokens", 0)
        if chunk and budget >= chunk:  # so many that its last chunk is full, too: see shapes.even_budget
            budget = budget // chunk * max(chunk // 2, chunk - int(lengths[0]) + 1)
        if self.encoder.padded:
            count = budget // int(lengths[0])
        else:
            ends = np.cumsum(lengths[:budget])  # each has a token at least: no more than `budget` texts can fit
            count = int(np.searchsorted(ends, budget, side="right"))
        return min(max(1, count), len(lengths))

    def _timed(self, ids: Ints, starts: Ints) -> Floats:
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

    def _record(self, starts: Ints, seconds: float) -> None:
        lengths = (starts[1:] - starts[:-1]).astype(np.int64)
        pairs = int((lengths * lengths).sum())
        filled = int(lengths.max()) * len(lengths) if self.encoder.padded else int(starts[-1])
        with self._counting:
            self.budget.record(filled, self._work(int(starts[-1]), pairs), seconds)

    def _sent(self, ids: Any, starts: Any, into: Any = None, places: Any = None) -> _Sent:
        encoder: Any = self.encoder  # asked each time: a smaller one may have taken its place
        try:
            pending = encoder.submit(ids, starts) if into is None else encoder.submit(ids, starts, into, places)
        except Exception as exc:
            # Another thread may have put a smaller encoder in its place, and closed this one: `_fetched` asks that one.
            if not is_out_of_memory(exc) and (self._in_use(encoder) or self._closed):
                raise
            pending = None  # tried again, smaller, when its turn comes and the others have left
        return _Sent(ids, starts, encoder, pending, into is not None)

    def _fetched(self, batch: _Sent) -> Floats | None:
        """The batch's rows; None when they are where they belong already."""
        if self._in_use(batch.encoder) and batch.pending is not None:
            try:
                pooled: Floats = batch.pending.result()
            except Exception as exc:
                if not is_out_of_memory(exc) and self._in_use(batch.encoder):
                    raise
                exc.__traceback__ = None
            else:
                return None if batch.direct else pooled
        with self._lock:
            self._check_open()
            if batch.encoder is not self.encoder:  # it was closed for a smaller one with this batch under way
                return self._timed(batch.ids, batch.starts)
            return self._smaller_batches(batch.ids, batch.starts)

    def _smaller_batches(self, ids: Ints, starts: Ints) -> Floats:
        """The batch in halves, quarters, … until each part fits. Raises OutOfMemory when one text alone does not."""
        whole = Tokens(ids, starts, 0)
        lengths = whole.lengths.tolist()
        total, longest = int(starts[-1]), max(lengths)

        def attempt(tokens: int) -> Floats:
            parts = [
                self.encoder.run(*whole.part(some.start, some.stop)[:2])
                for some in batches(lengths, tokens, padded=self.encoder.padded)
            ]
            return np.concatenate(parts)

        try:
            fit = fit_batch(attempt, max(longest, total // 2), minimum=longest)
        except OutOfMemory as exc:
            return self._smaller_encoder(ids, starts, exc)
        with self._counting:
            self.budget.lower(fit.batch)
        note = f"memory ran out with {total} tokens in a batch; {fit.batch} fit"
        if note not in self.notes:
            self.notes.append(note)
            log.warning("%s", note)
        return fit.result

    def _smaller_encoder(self, ids: Any, starts: Any, exc: OutOfMemory) -> Floats:
        longest = int((starts[1:] - starts[:-1]).max())
        old = self._replaced = self.encoder  # a thread that still sends to it is told so, and waits for the lock
        try:
            self.encoder, smaller = self._replace(old)
        except BaseException:
            self._closed = True  # nothing is left to compute with
            raise
        self._replaced = None if self.encoder is old else old
        if self.encoder is not old:
            old.close()  # twice is no error
        if not smaller:
            raise OutOfMemory(
                f"a single text of {longest} tokens does not fit in the device's memory: {exc.message}",
                hint="set max_length, use quantization='int8' (or allow_quantize=True), a smaller model, or device='cpu'",
            ) from exc
        return self._timed(ids, starts)

    def _in_use(self, encoder: Encoder) -> bool:
        return encoder is self.encoder and encoder is not self._replaced


@dataclass(frozen=True)
class _Sent:
    """A batch that a device has been given; `pending` None: it did not fit."""

    ids: Ints
    starts: Ints
    encoder: Any  # that was given it
    pending: Any
    direct: bool  # it writes the vectors where they belong


@lru_cache(maxsize=16)
def _takes_places(kind: type) -> bool:
    """True if an encoder writes its vectors to the caller's rows itself."""
    return "places" in inspect.signature(kind.submit).parameters  # type: ignore[attr-defined]


def longest_first(tokens: Tokens) -> tuple[npt.NDArray[np.intp], Ints]:
    """The order in which texts are computed, and their lengths in it.

    If memory does not suffice, that shows at once; and padding, where there is any, is least.
    """
    order = np.argsort(-tokens.lengths, kind="stable")
    return order, tokens.lengths[order]


class FairLock:
    """`with turns: …`, first come, first served; threading's own may go to the same thread again and again."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._waiting.append(mine)
        try:
            mine.acquire()  # until the one before hands it over
        except BaseException:  # Ctrl-C while waiting
            with self._mutex:
                was_waiting = mine in self._waiting
                if was_waiting:
                    self._waiting.remove(mine)
            if not was_waiting:
                self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Hand it over to the thread that has waited longest."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


class Budget:
    """The number of tokens per batch, and the search for it by timing real batches. Not thread-safe: its owner holds a lock.

    Nothing is computed only to be timed. A batch's time is divided by its work (products and attention, counted), so that
    batches of short and long texts can be compared.

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

        Not remembered: what else uses the memory now may be gone when the next process starts.
        """
        self.limit = tokens
        self.tokens = min(self.tokens, self.limit)
        self._rates = {size: rates for size, rates in self._rates.items() if size <= self.limit}
        self.settled, self.source = True, "lowered: memory ran out above it"

    def describe(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "source": self.source if self.settled else f"{self.source}, being measured"}
