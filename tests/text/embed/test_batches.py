"""Batches: how texts are cut into them, in what size, and what happens when memory runs out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.faulty_disk import left_since

from anytorch.errors import OutOfMemory, UsageError
from anytorch.measured import store
from anytorch.measured.verdict import Question
from anytorch.recorded.moves import gather_by_index
from anytorch.text.embed.protocol import Encoder, batches
from anytorch.text.embed.queue_line import share_batch
from anytorch.text.embed.runner import GAIN, SAMPLES, Budget, EncodeJob, FairLock, Runner
from anytorch.text.embed.tokens import Tokens
from anytorch.text.embed.windows import FIRST_TEXTS, MOST_CHARACTERS, chunks, windows


def WORK(tokens: int, pairs: int) -> float:
    return 100.0 * tokens + pairs


def make_tokens(lengths: list[int], seed: int = 0) -> Tokens:
    starts = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    ids = np.random.default_rng(seed).integers(0, 30000, int(starts[-1])).astype(np.int32)
    return Tokens(ids, starts, 0)


# --- cutting ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200), st.booleans())
def test_batches_cover_all_texts_within_the_budget(lengths: list[int], budget: int, padded: bool) -> None:
    found = batches(lengths, budget, padded=padded)
    assert [i for batch in found for i in batch] == list(range(len(lengths)))
    for batch in found:
        some = lengths[batch.start : batch.stop]
        cost = max(some) * len(some) if padded else sum(some)
        assert len(some) == 1 or cost <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 200), st.booleans())
def test_the_runners_next_batch_is_the_first_of_batches(lengths: list[int], budget: int, padded: bool) -> None:
    encoder = Plain()
    encoder.padded = padded
    sorted_lengths = sorted(lengths, reverse=True)
    found = Runner(encoder, Budget(budget, fixed=True), WORK)._next(np.array(sorted_lengths, np.int32))
    assert found == len(batches(sorted_lengths, budget, padded=padded)[0])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.randoms())
def test_pack_gathers_texts(lengths: list[int], generator: Any) -> None:
    tokens = make_tokens(lengths)
    places = list(range(len(lengths)))
    generator.shuffle(places)
    ids, starts = gather_by_index(tokens.ids, tokens.starts, np.array(places))
    for row, place in enumerate(places):
        expected = tokens.ids[tokens.starts[place] : tokens.starts[place + 1]]
        assert np.array_equal(ids[starts[row] : starts[row + 1]], expected)
    assert ids.dtype == starts.dtype == np.int32


# --- sharing a batch between requests -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 40), min_size=1, max_size=20)), max_size=12),
    st.integers(1, 300),
)
def test_a_shared_batch_is_fair(waiting: list[tuple[int, list[int]]], budget: int) -> None:
    waiting = [(begin % len(lengths), lengths) for begin, lengths in waiting]
    shares = share_batch(waiting, budget)
    taken = [sum(waiting[s.request][1][s.begin : s.end]) for s in shares]
    for share in shares:
        begin, lengths = waiting[share.request]
        assert begin == share.begin < share.end <= len(lengths)
    if waiting:
        assert shares[0].request == 0, "the oldest always gets something"
        first = waiting[0][1][waiting[0][0]]
        assert sum(taken) <= max(budget, first)
        # Whoever fits into an equal part of the budget is served whole, unless the oldest's first text takes it all.
        equal = budget // len(waiting)
        if first <= equal:
            done = {s.request for s in shares if s.end == len(waiting[s.request][1])}
            for place, (begin, lengths) in enumerate(waiting):
                assert sum(lengths[begin:]) > equal or place in done


def test_a_short_request_does_not_wait_for_a_long_one() -> None:
    shares = share_batch([(0, [10] * 1000), (0, [5])], 100)
    assert [(s.request, s.end - s.begin) for s in shares] == [(0, 9), (1, 1)]
    assert share_batch([], 100) == []


def test_a_long_text_has_its_turn_by_its_age() -> None:
    shares = share_batch([(0, [10]), (0, [60]), (0, [50]), (0, [10])], 100)
    assert [s.request for s in shares] == [0, 1, 3]  # not the 50, which would fit in its stead


def test_many_texts_do_not_take_the_turns_of_others() -> None:
    shares = share_batch([(0, [40] * 50), (0, [40]), (0, [40])], 100)
    assert [(s.request, s.end) for s in shares] == [(0, 1), (1, 1)]
    alone = share_batch([(3, [10] * 50)], 100)
    assert [(s.begin, s.end) for s in alone] == [(3, 13)]


# --- windows ----------------------------------------------------------------------------------------------------------


def test_chunks_are_lazy_and_bounded() -> None:
    drawn = []

    def source() -> Iterator[str]:
        for number in range(1000):
            drawn.append(number)
            yield "x"

    pieces = chunks(source(), lambda number: 10 * (number + 1))
    assert len(next(pieces)) == 10 and len(drawn) == 10
    assert len(next(pieces)) == 20 and len(drawn) == 30
    long = "y" * (MOST_CHARACTERS // 2)
    assert [len(piece) for piece in chunks([long] * 5, lambda number: 5)] == [2, 2, 1]
    assert [len(piece) for piece in chunks(["z" * (MOST_CHARACTERS + 1)] * 2, lambda number: 5)] == [1, 1]


def test_windows_come_in_order_and_draw_in_the_callers_thread() -> None:
    threads = set()

    def source() -> Iterator[str]:
        for number in range(3000):
            threads.add(threading.current_thread())
            yield str(number)

    seen: list[int] = []
    tokenizing = set()

    def tokenize(texts: list[str], first: int) -> Tokens:
        tokenizing.add(threading.current_thread())
        assert texts[0] == str(first)
        return make_tokens([3] * len(texts))

    sizes = []
    for window in windows(source(), tokenize, target_tokens=lambda: 3000, workers=2):
        assert window.first == sum(sizes)
        sizes.append(window.count)
        seen += range(window.first, window.first + window.count)
    assert seen == list(range(3000)) and sizes[0] == FIRST_TEXTS and max(sizes) == 1000
    assert threads == {threading.current_thread()} and threading.current_thread() not in tokenizing


def test_an_error_while_tokenizing_reaches_the_caller() -> None:
    def tokenize(texts: list[str], first: int) -> Tokens:
        if first:
            raise ValueError("bad")
        return make_tokens([1] * len(texts))

    found = windows(iter(["a"] * 1000), tokenize, target_tokens=lambda: 100)
    with pytest.raises(ValueError, match="bad"):
        list(found)
    before = set(threading.enumerate())
    stopped = windows(iter(["a"] * 1000), lambda texts, first: make_tokens([1] * len(texts)), target_tokens=lambda: 100)
    next(stopped)
    stopped.close()
    assert not left_since(before), "a caller who stops early leaves a thread behind"


# --- the size of a batch ------------------------------------------------------------------------------------------------


def drive(budget: Budget, rate: Callable[[int], float]) -> list[int]:
    tried = []
    for _ in range(100):
        if budget.settled:
            break
        tried.append(budget.tokens)
        budget.record(budget.tokens, 1000.0 * budget.tokens, 1000.0 * budget.tokens / rate(budget.tokens))
    return list(dict.fromkeys(tried))


def test_the_budget_climbs_while_it_pays() -> None:
    k, other = (Question("tokens per batch", name, "cpu", {"model": name}) for name in ("k", "other"))
    budget = Budget(1024, asked=k)
    tried = drive(budget, lambda tokens: min(tokens, 8192))
    assert tried == [1024, 2048, 4096, 8192, 16384] and budget.tokens == 8192
    again = Budget(1024, asked=k)
    assert again.tokens == 8192 and again.settled and again.source == "remembered"
    assert Budget(1024, asked=other).tokens == 1024
    (verdict,) = store.verdicts()
    assert verdict.chosen == "8192" and [int(one.name) for one in verdict.trials] == tried


def test_one_lack_of_memory_does_not_lower_the_stored_batch() -> None:
    """Another process held the memory: the next one finds more."""
    k = Question("tokens per batch", "k", "cpu", {"model": "k"})
    drive(Budget(1024, asked=k), lambda tokens: min(tokens, 8192))
    unlucky = Budget(1024, asked=k)
    unlucky.lower(512)
    assert unlucky.tokens == 512 and "memory ran out" in unlucky.source
    assert Budget(1024, asked=k).tokens == 8192
    fresh = Budget(1024, asked=Question("tokens per batch", "new", "cpu", {"model": "new"}))
    fresh.lower(512)
    assert len(list(store.verdicts())) == 1


def test_the_budget_goes_down_where_small_is_as_fast() -> None:
    budget = Budget(4096)
    assert drive(budget, lambda tokens: 1.0) == [4096, 8192, 2048, 1024, 512, 256] and budget.tokens == 256
    assert drive(budget := Budget(4096), lambda tokens: GAIN**-2 if tokens < 4096 else 1.0) and budget.tokens == 4096


def test_half_empty_batches_and_given_budgets_are_not_measured() -> None:
    budget = Budget(1000)
    for _ in range(10 * SAMPLES):
        budget.record(100, 1.0, 1.0)
    assert not budget.settled and budget.tokens == 1000
    given_one = Budget(1000, fixed=True)
    given_one.record(1000, 1.0, 1.0)
    assert given_one.tokens == 1000 and given_one.describe()["source"] == "given"


def test_what_memory_did_not_allow_once_is_not_remembered() -> None:
    """Another program may have held the memory; the next process finds out for itself."""
    k, other = (Question("tokens per batch", name, "cpu", {"model": name}) for name in ("k", "other"))
    budget = Budget(1024, asked=k)
    drive(budget, lambda tokens: min(tokens, 8192))
    budget.lower(256)
    assert budget.tokens == 256 and budget.settled and "memory ran out" in budget.describe()["source"]
    assert Budget(1024, asked=k).tokens == 8192
    never_measured = Budget(1024, asked=other, search=False)
    never_measured.lower(256)
    assert Budget(1024, asked=other, search=False).tokens == 1024


def test_a_damaged_store_is_not_the_end() -> None:
    k = Question("tokens per batch", "k", "cpu", {"model": "k"})
    drive(Budget(1024, asked=k), lambda tokens: 1.0)
    (path,) = store.folder().iterdir()
    path.write_text("{")
    store.forget()
    budget = Budget(1024, asked=k)
    assert not budget.settled
    drive(budget, lambda tokens: 1.0)
    assert budget.settled and Budget(1024, asked=k).settled


# --- running ----------------------------------------------------------------------------------------------------------


class Plain:
    padded = False
    width = 2

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.calls: list[int] = []
        self.closed = 0

    def run(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
        if len(ids) > self.most:
            raise OutOfMemory(f"{len(ids)} tokens")
        self.calls.append(len(ids))
        first = ids[starts[:-1]].astype(np.float32)
        return np.stack([first, np.diff(starts).astype(np.float32)], axis=1)

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed += 1


class Ahead(Plain):
    """Computes when asked for the result, and fails there or when given the batch."""

    in_flight = 2

    def __init__(self, most: int = 1 << 30, *, fails_at_once: bool = False) -> None:
        super().__init__(most)
        self.under_way = self.most_under_way = 0
        self.fails_at_once = fails_at_once

    def submit(self, ids: np.ndarray, starts: np.ndarray) -> Any:
        if self.fails_at_once and len(ids) > self.most:
            raise OutOfMemory("at once")
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        outer = self

        class Pending:
            def result(self) -> np.ndarray:
                outer.under_way -= 1
                return outer.run(ids, starts)

        return Pending()


def run_all(runner: Runner, tokens: Tokens) -> np.ndarray:
    out = np.full((len(tokens.starts) - 1, 2), -1, np.float32)

    def store(places: np.ndarray, pooled: np.ndarray | None) -> None:
        assert pooled is not None
        out[places] = pooled

    runner.run(EncodeJob(tokens, store))
    return out


@pytest.mark.parametrize("kind", [Plain, Ahead])
@pytest.mark.parametrize("most", [1 << 30, 300, 60])
def test_every_text_gets_its_own_row(kind: Any, most: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(1).integers(1, 60, 200)]
    tokens = make_tokens(lengths)
    encoder = kind(most)
    runner = Runner(encoder, Budget(500, fixed=True), WORK)
    out = run_all(runner, tokens)
    assert out[:, 1].tolist() == lengths
    assert out[:, 0].tolist() == tokens.ids[tokens.starts[:-1]].tolist()
    assert max(encoder.calls) <= min(500, most)
    if most < 500:
        assert runner.budget.tokens <= most and "memory ran out" in runner.notes[0]
    if kind is Ahead and most > 500:
        assert encoder.most_under_way == 3


def test_out_of_memory_while_sending_ahead() -> None:
    encoder = Ahead(100, fails_at_once=True)
    lengths = [30] * 50
    out = run_all(Runner(encoder, Budget(500, fixed=True), WORK), make_tokens(lengths))
    assert out[:, 1].tolist() == lengths and encoder.under_way == 0


def test_one_text_that_does_not_fit() -> None:
    tokens = make_tokens([5, 200, 5])
    with pytest.raises(OutOfMemory, match="a single text of 200 tokens does not fit") as caught:
        run_all(Runner(Plain(100), Budget(500, fixed=True), WORK), tokens)
    assert "allow_quantize" in caught.value.hint
    large, small = Plain(100), Plain()
    runner = Runner(large, Budget(500, fixed=True), WORK, replace=lambda old: (small, True))
    assert run_all(runner, tokens)[:, 1].tolist() == [5, 200, 5]
    assert large.closed == 1 and small.calls and runner.encoder is small


def test_a_smaller_encoder_takes_over_what_the_closed_one_had_under_way() -> None:
    class Closing(Ahead):
        def submit(self, ids: np.ndarray, starts: np.ndarray) -> Any:
            assert not self.closed, "given a batch after it was closed"
            return super().submit(ids, starts)

        def run(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
            assert not self.closed, "asked for a batch after it was closed"
            return super().run(ids, starts)

    large, small = Closing(100), Closing()
    runner = Runner(large, Budget(250, fixed=True), WORK, replace=lambda old: (small, True))
    lengths = [200, *[40] * 60]
    assert run_all(runner, make_tokens(lengths))[:, 1].tolist() == lengths
    assert large.closed == 1 and runner.encoder is small and small.most_under_way > 1


def test_a_thread_that_still_sends_to_the_closed_one_comes_back() -> None:
    """Between asking which encoder there is and sending to it, another thread may have put a smaller one in its place."""
    small = Ahead()

    class Replaced(Ahead):
        def submit(self, ids: np.ndarray, starts: np.ndarray) -> Any:
            runner.encoder = small  # what `_smaller_encoder` does, in another thread
            raise UsageError("this encoder is closed")

    runner = Runner(Replaced(), Budget(250, fixed=True), WORK)
    lengths = [40] * 20
    assert run_all(runner, make_tokens(lengths))[:, 1].tolist() == lengths
    answer = Runner(small, Budget(250, fixed=True), WORK).start_packed(*make_tokens([3, 4])[:2])()
    assert answer[:, 1].tolist() == [3, 4]


def test_a_closed_runner_still_says_so() -> None:
    class Closed(Ahead):
        def submit(self, ids: np.ndarray, starts: np.ndarray) -> Any:
            raise UsageError("this encoder is closed")

    with pytest.raises(UsageError, match="closed"):
        run_all(Runner(Closed(), Budget(250, fixed=True), WORK), make_tokens([3]))


def test_other_errors_pass_through() -> None:
    class Broken(Plain):
        def run(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
            raise KeyError("mine")

    for encoder in (Broken(), type("Both", (Broken, Ahead), {})()):
        with pytest.raises(KeyError, match="mine"):
            run_all(Runner(encoder, Budget(500, fixed=True), WORK), make_tokens([3]))


def test_concurrent_callers_take_turns() -> None:
    """A long job does not keep a short one waiting until its end."""
    finished: list[str] = []

    began = threading.Event()

    class Held(Plain):
        def run(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
            if not began.is_set():  # the long one's first batch, until the short one waits for its turn
                began.set()
                until = time.monotonic() + 120
                while not runner._lock._waiting:
                    assert time.monotonic() < until
                    time.sleep(0.0005)
            return super().run(ids, starts)

    runner = Runner(Held(), Budget(10, fixed=True), WORK)

    def job(name: str, count: int) -> None:
        run_all(runner, make_tokens([10] * count))
        finished.append(name)

    long = threading.Thread(target=job, args=("long", 400))
    long.start()
    assert began.wait(120)
    job("short", 1)
    long.join()
    assert finished == ["short", "long"]


def test_closed() -> None:
    encoder = Plain()
    runner = Runner(encoder, Budget(10, fixed=True), WORK)
    runner.close()
    assert encoder.closed == 1 and isinstance(encoder, Encoder)
    with pytest.raises(UsageError, match="closed"):
        run_all(runner, make_tokens([1]))
    with pytest.raises(UsageError, match="closed"):
        runner.start_packed(np.zeros(1, np.int32), np.array([0, 1], np.int32))()


def test_turns_go_to_whoever_waited_longest() -> None:
    turns, order = FairLock(), []
    with turns:
        threads = []
        for number in range(8):
            thread = threading.Thread(target=lambda n=number: _enter(turns, order, n))  # type: ignore[misc]
            thread.start()
            threads.append(thread)
            while len(turns._waiting) <= number:
                time.sleep(0.0005)
    for thread in threads:
        thread.join(120)
    assert order == list(range(8)) and not turns._held


def _enter(turns: FairLock, order: list[int], number: int) -> None:
    with turns:
        order.append(number)


class Direct(Ahead):
    """Writes its vectors where it is told to."""

    def submit(self, ids: np.ndarray, starts: np.ndarray, out: Any = None, places: Any = None) -> Any:
        pending = super().submit(ids, starts)
        if out is None:
            return pending

        class Written:
            def result(self) -> np.ndarray:
                out[places] = pending.result()
                return out

        return Written()


@pytest.mark.parametrize("most", [1 << 30, 60])
def test_an_encoder_may_write_the_rows_itself(most: int) -> None:
    lengths = [int(n) for n in np.random.default_rng(2).integers(1, 60, 100)]
    tokens = make_tokens(lengths)
    rows = np.full((100, 2), -1, np.float32)
    left: list[int] = []

    def store(places: np.ndarray, pooled: np.ndarray | None) -> None:
        if pooled is not None:
            rows[places] = pooled
            left.extend(places.tolist())

    Runner(Direct(most), Budget(500, fixed=True), WORK).run(EncodeJob(tokens, store, rows))
    assert rows[:, 1].tolist() == lengths
    assert bool(left) == (most < 500), "only what did not fit comes back through the engine"


def test_the_next_job_is_sent_before_the_last_is_fetched() -> None:
    encoder = Ahead()
    runner = Runner(encoder, Budget(10, fixed=True), WORK)
    drawn, seen = [], []

    def jobs() -> Iterator[EncodeJob]:
        for number in range(6):
            drawn.append(number)
            yield EncodeJob(make_tokens([10]), lambda places, pooled: None)
        yield EncodeJob(make_tokens([]), lambda places, pooled: None)

    for job in runner.stream(jobs()):
        seen.append((len(drawn), len(job.tokens.ids)))
    assert seen[0] == (3, 10), "three are under way when the first one is fetched"
    assert sorted(tokens for _, tokens in seen) == [0, 10, 10, 10, 10, 10, 10] and encoder.under_way == 0
