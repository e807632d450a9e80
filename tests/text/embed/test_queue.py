"""Many callers, one engine: threads and tasks, full queues, failures, cancelling, closing."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.faulty_disk import failing_threads
from tests.waiting import until

from anytorch.errors import InputError, NoThread, OutOfMemory, QueueClosed, QueueFull, UsageError
from anytorch.text.embed import queue as queue_module
from anytorch.text.embed.queue import BatchReport, EngineQueue
from anytorch.text.embed.tokens import pack_ids

TEXTS = [f"text number {n} " + "word " * (n % 7) for n in range(40)]


class Gate:
    """Holds the encoder back until it is opened, so that requests gather in the queue."""

    def __init__(self, encoder: Any) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        encoder.before = self.pass_through

    def pass_through(self, lengths: list[int]) -> None:
        self.reached.set()
        assert self.opened.wait(120)


@pytest.fixture
def encoder(make_encoder: Callable[..., Any]) -> Any:
    return make_encoder()


@pytest.fixture
def engine(fake_engine: Callable[..., Any], encoder: Any) -> Any:
    return fake_engine(encoder)


def test_concurrent_requests_share_batches_and_get_their_own_answers(engine: Any, encoder: Any) -> None:
    alone = engine.encode(TEXTS)
    encoder.calls.clear()
    gate = Gate(encoder)
    with EngineQueue(engine) as queue:
        first = queue.submit(TEXTS[0])
        assert gate.reached.wait(120)
        futures = [queue.submit([text]) for text in TEXTS[1:]]
        gate.opened.set()
        assert np.array_equal(first.result(120), alone[0])
        for number, future in enumerate(futures, 1):
            assert np.array_equal(future.result(120), alone[number : number + 1])
        assert [len(call) for call in encoder.calls] == [1, 39]
        stats = queue.stats
        assert (stats.requests, stats.texts, stats.batches, stats.waiting_requests) == (40, 40, 2, 0)


def test_a_refused_thread_wedges_nobody(engine: Any) -> None:
    """The request that found none is told; the queue is not left waiting for a thread that never ran."""
    alone = engine.encode(TEXTS[:2])
    with EngineQueue(engine) as queue:
        with failing_threads(1), pytest.raises(NoThread, match="anytorch-queue"):
            queue.submit(TEXTS[0])
        assert not queue._line.requests
        assert np.array_equal(queue.submit(TEXTS[1]).result(120), alone[1])


def test_a_worker_that_a_fork_left_behind_is_replaced(engine: Any) -> None:
    with EngineQueue(engine) as queue:
        of_parent = threading.Thread(target=lambda: None)
        of_parent.start()
        of_parent.join()  # as the child of a fork sees its parent's threads: ended
        queue._thread = of_parent
        assert queue.encode(["a"], timeout_s=60).shape[0] == 1


def test_from_many_threads(engine: Any) -> None:
    alone = engine.encode(TEXTS)
    with EngineQueue(engine, batch_tokens=64) as queue, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: queue.encode(TEXTS[n : n + 3]), range(37)))
    for number, vectors in enumerate(found):
        assert np.array_equal(vectors, alone[number : number + 3])


def test_from_asyncio(engine: Any) -> None:
    alone = engine.encode(TEXTS)

    async def main() -> None:
        found = await asyncio.gather(*(engine.aencode(text) for text in TEXTS), engine.aencode(TEXTS, dim=4))
        for number in range(40):
            assert np.array_equal(found[number], alone[number])
        assert np.allclose(found[40], engine.encode(TEXTS, dim=4))

    asyncio.run(main())
    assert engine.queue.stats.requests == 41


def test_options_of_a_request(engine: Any) -> None:
    with EngineQueue(engine) as queue:
        assert np.array_equal(queue.encode(TEXTS, precision="int8"), engine.encode(TEXTS, precision="int8"))
        assert queue.encode("one", output="list") == engine.encode("one", output="list")
        assert queue.encode([]).shape == (0, 16) and queue.encode(iter(TEXTS[:2])).shape == (2, 16)
        assert np.array_equal(queue.encode(["x"], prompt="a "), engine.encode(["a x"]))
        pyarrow = pytest.importorskip("pyarrow")
        assert np.array_equal(queue.encode(pyarrow.array(TEXTS)), engine.encode(TEXTS))
        for bad, error in (
            ({"dim": 99}, UsageError),
            ({"precision": "int3"}, UsageError),
            ({"output": "x"}, UsageError),
        ):
            with pytest.raises(error):
                queue.submit((pytest.fail("the texts were read") for _ in range(1)), **bad)
        for texts in (5, b"x", [None], ["a\ud800"]):
            with pytest.raises(InputError):
                queue.submit(texts)


def test_a_short_request_overtakes_a_long_one(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    with EngineQueue(engine, batch_tokens=50) as queue:
        long = queue.submit(["a long request of many texts"] * 500)
        assert gate.reached.wait(120)
        short = queue.submit("short")
        long_was_done: list[bool] = []
        short.add_done_callback(lambda future: long_was_done.append(long.done()))
        gate.opened.set()
        short.result(120)
        until(lambda: long_was_done, "what hangs on the short one to be called")
        assert long_was_done == [False], "the short one had to wait for the long one"
        assert long.result(120).shape == (500, 16)
        assert max(sum(call) for call in encoder.calls) <= 50


def test_a_lone_caller_does_not_wait_for_company(engine: Any) -> None:
    with EngineQueue(engine, max_wait_s=600) as queue:
        began = time.monotonic()
        for text in TEXTS[:5]:
            queue.encode(text)
        assert time.monotonic() - began < 300


def test_one_bad_request_does_not_spoil_the_batch(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    poison = len(engine.tokenize(["poison " * 20]).ids)
    with EngineQueue(engine) as queue:
        first = queue.submit("first")
        assert gate.reached.wait(120)
        futures = [queue.submit(text) for text in ("fine", "poison " * 20, "also fine")]

        def before(lengths: list[int]) -> None:
            if poison in lengths:
                raise KeyError("poisoned")

        encoder.before = before
        gate.opened.set()
        first.result(120)
        assert futures[0].result(120).shape == futures[2].result(120).shape == (16,)
        with pytest.raises(KeyError, match="poisoned"):
            futures[1].result(120)
        assert queue.stats.failed == 1
        assert queue.encode("still alive").shape == (16,)


def test_out_of_memory_splits_the_batch_and_nobody_notices(
    fake_engine: Callable[..., Any], make_encoder: Callable[..., Any]
) -> None:
    engine = fake_engine(make_encoder(most_tokens=40))
    with EngineQueue(engine) as queue:
        assert queue.encode(TEXTS).shape == (40, 16)
        with pytest.raises(OutOfMemory, match="a single text"):
            queue.encode("word " * 100)
        assert queue.encode("fine").shape == (16,)


def test_cancelling_takes_a_request_out(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    with EngineQueue(engine) as queue:
        first = queue.submit("first")
        assert gate.reached.wait(120)
        second, third = queue.submit(TEXTS), queue.submit("third")
        assert second.cancel()
        gate.opened.set()
        first.result(120), third.result(120)
        assert [len(call) for call in encoder.calls] == [1, 1] and queue.stats.cancelled == 1
        with pytest.raises(CancelledError):
            second.result()


def test_cancelling_a_task(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)

    async def main(queue: EngineQueue) -> None:
        first = asyncio.create_task(queue.aencode("first"))
        await asyncio.to_thread(gate.reached.wait, 120)
        second = asyncio.create_task(queue.aencode(TEXTS))
        while queue.stats.requests < 2:
            await asyncio.sleep(0.001)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.opened.set()
        assert (await first).shape == (16,)

    with EngineQueue(engine) as queue:
        asyncio.run(main(queue))
        queue.encode("after")
        assert [len(call) for call in encoder.calls] == [1, 1]


def test_a_request_whose_time_is_up(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    with EngineQueue(engine) as queue:
        first = queue.submit("first")
        assert gate.reached.wait(120)
        late = queue.submit("late", timeout_s=0.01)
        time.sleep(0.05)
        gate.opened.set()
        first.result(120)
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            late.result(120)
        assert queue.stats.timed_out == 1


def test_a_full_queue_refuses_or_waits(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    with EngineQueue(engine, max_waiting_tokens=20, when_full="raise") as queue:
        first = queue.submit(["a text that is larger than the whole queue may be " * 3])  # one alone is always taken
        assert gate.reached.wait(120)
        second = queue.submit("waiting " * 15)
        with pytest.raises(QueueFull, match="the limit is 20 tokens"):
            queue.submit("no room " * 5)
        assert queue.stats.rejected == 1 and queue.stats.waiting_tokens == 17
        gate.opened.set()
        assert first.result(120).shape == (1, 16) and second.result(120).shape == (16,)

    encoder.before = (gate := Gate(encoder)).pass_through
    with EngineQueue(engine, max_waiting_tokens=20) as queue:
        queue.submit("first")
        assert gate.reached.wait(120)
        queue.submit("waiting " * 15)
        with pytest.raises(TimeoutError, match="stayed full"):
            queue.submit("no room " * 5, timeout_s=0.02)
        third: list[Any] = []
        waiter = threading.Thread(target=lambda: third.append(queue.encode("no room " * 5)))
        waiter.start()
        until(lambda: queue.stats.without_room == 1)
        assert not third
        gate.opened.set()
        waiter.join(120)
        assert third[0].shape == (16,)


def functions_of(thread: int) -> set[str]:
    """The names of the functions that a thread is in."""
    frame, names = sys._current_frames().get(thread), set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


@pytest.mark.skipif(sys.platform == "win32", reason="signals to a thread")
def test_an_interrupted_caller_leaves_nothing_in_the_queue(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    with EngineQueue(engine) as queue:
        first = queue.submit("first")
        assert gate.reached.wait(120)
        mine = threading.get_ident()

        def interrupt() -> None:
            until(lambda: "result" in functions_of(mine))  # it is no longer on its way into the queue
            signal.pthread_kill(mine, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            queue.encode(TEXTS)
        assert queue.stats.waiting_requests == 0 and queue.stats.cancelled == 1
        gate.opened.set()
        first.result(120)
        assert len(encoder.calls) == 1, "computed for nobody"


def test_closing_finishes_or_cancels_what_waits(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    queue = EngineQueue(engine)
    first, second = queue.submit("first"), None
    assert gate.reached.wait(120)
    second = queue.submit(TEXTS)
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue.closing:
        time.sleep(0.001)
    with pytest.raises(UsageError, match="closed"):
        queue.submit("too late")
    gate.opened.set()
    closing.join(120)
    assert first.done() and second.result(0).shape == (40, 16)
    queue.close()

    gate = Gate(encoder)
    queue = EngineQueue(engine)
    first = queue.submit("first")
    assert gate.reached.wait(120)
    second = queue.submit(TEXTS)
    second.add_done_callback(lambda _: gate.opened.set())
    queue.close(drain=False)
    assert first.result(0).shape == (16,) and second.cancelled()


def test_engine_close_drains_its_queue(engine: Any, encoder: Any) -> None:
    future = engine.queue.submit(TEXTS)
    engine.close()
    assert future.result(0).shape == (40, 16) and encoder.closed
    engine.close()


def test_an_idle_queue_lets_its_engine_go(engine: Any, encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "IDLE_S", 0.02)
    gate = Gate(encoder)
    queue = EngineQueue(engine)
    future = queue.submit(TEXTS[:2])
    assert gate.reached.wait(120)
    thread = queue._thread
    gate.opened.set()
    assert thread is not None
    expected = future.result(120)
    thread.join(120)
    assert not thread.is_alive() and queue._thread is None
    assert np.array_equal(queue.encode(TEXTS[:2]), expected)  # another worker serves it
    queue.close()


def test_options_of_the_queue(engine: Any) -> None:
    for options in ({"when_full": "explode"}, {"max_wait_s": -1}, {"batch_tokens": 0}, {"max_waiting_tokens": 0}):
        with pytest.raises(UsageError):
            EngineQueue(engine, **options)


def test_a_device_gets_the_next_batch_before_the_last_is_fetched(
    fake_engine: Callable[..., Any], make_encoder: Callable[..., Any]
) -> None:
    class Device(make_encoder):  # type: ignore[misc, valid-type]
        in_flight = 2
        under_way = most_under_way = 0

        def submit(self, ids: np.ndarray, starts: np.ndarray) -> Any:
            if 9999 in ids:
                raise KeyError("refused")
            self.under_way += 1
            self.most_under_way = max(self.under_way, self.most_under_way)
            outer = self

            class Pending:
                def result(self) -> np.ndarray:
                    outer.under_way -= 1
                    return outer.run(ids, starts)

            return Pending()

    device = Device()
    engine = fake_engine(device)
    alone = engine.encode(TEXTS)
    device.most_under_way = 0
    assert engine.batches_ahead == 1
    with EngineQueue(engine, batch_tokens=30) as queue:
        with queue._line.changed:  # the worker sees them all at once, and not one by one
            futures = [queue.submit(text) for text in TEXTS]
        for number, future in enumerate(futures):
            assert np.array_equal(future.result(120), alone[number])
        assert device.most_under_way == 2 and device.under_way == 0
        tokens = engine.tokenize(["x"])
        tokens.ids[1] = 9999
        queue._engine = SimpleNamespace(**{n: getattr(engine, n) for n in dir(engine) if not n.startswith("_")})
        queue._engine.tokenize = lambda texts, prompt=None: tokens
        with pytest.raises(KeyError, match="refused"):
            queue.encode("x")


def test_no_more_may_wait_than_can_be_computed_in_time(engine: Any, encoder: Any) -> None:
    """Tokens are not seconds: a queue that is long for this machine refuses, whatever its tokens."""
    tokens = int(engine.tokenize(["text number"] * 40).starts[-1])
    encoder.before = lambda lengths: time.sleep(0.1)  # at most 10 batches a second
    with EngineQueue(engine, batch_tokens=tokens, max_waiting_s=0.35, when_full="raise") as queue:
        queue.encode(["text number"] * 40)  # a full batch: now the rate is known
        gate = Gate(encoder)
        first = queue.submit("one")
        assert gate.reached.wait(120)
        rate = queue._line.tokens_per_s
        assert rate is not None and 0 < rate <= tokens / 0.1
        queue._line.tokens_per_s = tokens / 0.1  # on a busy machine it was slower
        accepted = []
        with pytest.raises(QueueFull, match=r"which takes 0\.\d s; the limit is 0\.35 s"):
            for _ in range(20):
                accepted.append(queue.submit(["text number"] * 40))
        gate.opened.set()
        assert len(accepted) == 4
        for future in (first, *accepted):
            future.result(120)
        assert queue.stats.rejected == 1
        assert queue.submit("welcome again").result(120) is not None


def test_short_texts_alone_do_not_make_the_queue_look_slow(engine: Any, encoder: Any) -> None:
    encoder.before = lambda lengths: time.sleep(0.02)
    with EngineQueue(engine, batch_tokens=10_000, max_waiting_s=0.01, when_full="raise") as queue:
        for _ in range(5):
            queue.encode("one")
        gate = Gate(encoder)
        futures = [queue.submit("one")]
        assert gate.reached.wait(120)
        futures += [queue.submit(TEXTS) for _ in range(5)]  # nothing is known of full batches: tokens alone decide
        gate.opened.set()
        for future in futures:
            future.result(120)


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_waiting_time_that_makes_no_sense(engine: Any, seconds: float) -> None:
    with pytest.raises(UsageError, match="max_waiting_s"):
        EngineQueue(engine, max_waiting_s=seconds)


def test_a_task_that_waits_for_room_can_be_cancelled(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)

    async def main() -> None:
        with EngineQueue(engine, max_waiting_tokens=20) as queue:
            first = asyncio.ensure_future(queue.aencode("first"))
            await asyncio.to_thread(gate.reached.wait, 120)
            inside = asyncio.ensure_future(queue.aencode("word " * 15))
            while queue.stats.waiting_requests < 1:
                await asyncio.sleep(0.002)
            outside = asyncio.ensure_future(queue.aencode("other " * 15))
            last = asyncio.ensure_future(queue.aencode("last " * 15))
            while queue.stats.without_room < 2:
                await asyncio.sleep(0.002)
            assert queue.stats.waiting_requests == 1
            outside.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outside
            gate.opened.set()
            await asyncio.gather(first, inside, last)
            assert queue.stats.cancelled == 1 and queue.stats.requests == 3 and queue.stats.without_room == 0

    asyncio.run(main())
    assert len(encoder.calls) == 3, "the cancelled request was computed for nobody"


def test_deadlines_are_kept_while_a_batch_is_computed(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    queue = EngineQueue(engine, max_waiting_tokens=20)
    first = queue.submit("first")
    assert gate.reached.wait(120)
    with pytest.raises(TimeoutError, match=r"not computed within 0\.05 s"):
        queue.encode("late", timeout_s=0.05)

    async def main() -> None:
        with pytest.raises(TimeoutError, match=r"0\.05 s"):
            await queue.aencode("late, too", timeout_s=0.05)
        waits = asyncio.ensure_future(queue.aencode("word " * 15))
        while not queue.stats.waiting_tokens > 15:
            await asyncio.sleep(0.002)
        with pytest.raises(TimeoutError, match="stayed full"):
            await queue.aencode("word " * 15, timeout_s=0.05)
        with pytest.raises(TimeoutError, match="stayed full"):
            await asyncio.to_thread(queue.submit, "word " * 15, timeout_s=0.05)
        gate.opened.set()
        await waits

    asyncio.run(main())
    assert first.result(120) is not None
    queue.close()
    assert queue.stats.timed_out == 4 and queue.stats.waiting_tokens == 0 and queue.stats.without_room == 0
    assert len(encoder.calls) == 2


def test_room_goes_to_whoever_waited_longest(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    done: list[int] = []
    with EngineQueue(engine, max_waiting_tokens=20, batch_tokens=20) as queue:
        first = queue.submit("first")
        assert gate.reached.wait(120)
        tokens = [engine.tokenize(["word " * 15]) for _ in range(4)]
        futures = [queue.submit_tokens(one) for one in tokens]  # does not block, though there is room for one alone
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, n=number: done.append(n))
        assert queue.stats.without_room == 3
        gate.opened.set()
        first.result(120)
    assert done == [0, 1, 2, 3]


def test_token_ids_are_the_texts_they_came_from(engine: Any) -> None:
    tokens = engine.tokenize(TEXTS)
    rows = [tokens.ids[a:b].tolist() for a, b in zip(tokens.starts, tokens.starts[1:], strict=False)]
    with EngineQueue(engine) as queue:
        packed = pack_ids(rows, vocabulary=10**6, max_length=engine.max_length)
        assert np.array_equal(queue.submit_tokens(packed).result(120), engine.encode(TEXTS))
    cases: list[tuple[Any, str]] = [([[]], "0 token ids"), ([[1] * 99], "99"), ([[1, -1]], "-1"), ([["a"]], "a")]
    for bad, words in (*cases, ([[1], [5, 7]], "text 1")):
        with pytest.raises(InputError, match=words):
            pack_ids(bad, vocabulary=7, max_length=8)


def test_batches_are_told_to_who_observes(engine: Any, encoder: Any) -> None:
    reports: list[BatchReport] = []
    with EngineQueue(engine, observe=reports.append) as queue:
        queue.encode(["one", "two three"])

        def broken(lengths: list[int]) -> None:
            raise RuntimeError("broken")

        encoder.before = broken
        with pytest.raises(RuntimeError):
            queue.encode("x")
    good, bad = reports
    assert good.texts == 2 and good.requests == 1 and not good.failed and bad.failed
    assert good.tokens == int(engine.tokenize(["one", "two three"]).starts[-1])
    assert good.seconds >= 0 and len(good.waited_s) == 1 and good.waited_s[0] >= 0


def test_who_observes_and_fails_costs_nobody_an_answer(
    engine: Any, encoder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    alone = engine.encode(TEXTS[:3])
    encoder.calls.clear()
    seen: list[int] = []

    def observe(report: BatchReport) -> None:
        seen.append(report.requests)
        raise ZeroDivisionError("a mean of nothing")

    gate = Gate(encoder)
    with caplog.at_level("ERROR", "anytorch"), EngineQueue(engine, observe=observe) as queue:
        first = queue.submit(TEXTS[0])
        assert gate.reached.wait(120)
        others = [queue.submit(text) for text in TEXTS[1:3]]
        gate.opened.set()
        assert np.array_equal([one.result(120) for one in (first, *others)], alone)
        assert queue.stats.failed == 0
    assert seen == [1, 2] and len(encoder.calls) == 2, "a batch was computed again"
    assert caplog.text.count("a mean of nothing") == 1


@pytest.mark.parametrize("ending", ["answer", "failure", "timeout", "closing"])
def test_what_hangs_on_a_future_is_called_without_the_queues_lock(engine: Any, encoder: Any, ending: str) -> None:
    gate = Gate(encoder)
    free: list[bool] = []

    def others_can_ask(_: Any) -> None:
        other = threading.Thread(target=lambda: queue.stats, daemon=True)
        other.start()
        other.join(30)
        free.append(not other.is_alive())

    queue = EngineQueue(engine)
    first = queue.submit("first")
    assert gate.reached.wait(120)
    second = queue.submit("second", timeout_s=0.001 if ending == "timeout" else None)
    (first if ending in ("answer", "failure") else second).add_done_callback(others_can_ask)
    if ending == "timeout":
        time.sleep(0.05)
    if ending == "failure":

        def fail(*_: Any) -> Any:
            raise KeyError("poisoned")

        engine.finish = fail
    closer = threading.Thread(target=queue.close, kwargs={"drain": ending != "closing"})
    if ending == "closing":
        closer.start()
        with pytest.raises(CancelledError):
            second.result(120)
    gate.opened.set()
    if ending == "timeout":
        with pytest.raises(TimeoutError):
            second.result(120)
    elif ending == "failure":
        with pytest.raises(KeyError, match="poisoned"):
            first.result(120)
    else:
        assert first.result(120).shape == (16,)
    if ending != "closing":
        closer.start()
    closer.join(120)
    assert free == [True]
    stats = queue.stats
    assert (stats.timed_out, stats.cancelled) == (ending == "timeout", ending == "closing")
    assert stats.failed == (2 if ending == "failure" else 0) and stats.waiting_tokens == 0


def test_a_queue_that_hangs_says_so(engine: Any, encoder: Any) -> None:
    gate = Gate(encoder)
    queue = EngineQueue(engine)
    assert queue.stuck() == ""
    future = queue.submit("x")
    assert gate.reached.wait(120)
    until(lambda: queue.stuck(after_s=0.0) != "")
    assert "not come back" in queue.stuck(after_s=0.0) and queue.stuck() == ""
    gate.opened.set()
    future.result(120)
    queue.close()
    assert queue.stuck(after_s=0.0) == ""
    with pytest.raises(QueueClosed):
        queue.submit("late")
