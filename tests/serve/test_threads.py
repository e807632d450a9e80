"""Pools of threads: bounded, separate, withdrawn from, watched; memory that is held until the last thread has ended."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.waiting import until

from anytorch.forecast import queue
from anytorch.serve.app import create_app
from anytorch.serve.limits import Call, within
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.serve.threads import HOLDER, Abandoned, Pools, Threads, go_on

LONG = "word " * 1000  # is tokenized in a thread


class Hang:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = 0

    def __call__(self, *_: Any, **__: Any) -> str:
        self.begun += 1
        assert self.go.wait(120), "never told to end"
        return "done"


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.go.set()


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await work()

    return asyncio.run(run())


async def turns(happens: Callable[[], object]) -> None:
    """Let the event loop turn until something has happened."""
    for _ in range(6_000):
        if happens():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def test_results_and_errors_come_back() -> None:
    async def work() -> None:
        pool = Threads("test", 2)
        assert await pool.run(divmod, 7, 2) == (3, 1)
        assert await pool.run(sorted, [2, 1], reverse=True) == [2, 1]
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)

    in_loop(work)


def test_an_end_of_an_iterator_reaches_who_awaits_it() -> None:
    """asyncio takes no StopIteration: the coroutine would wait for ever."""

    async def work() -> None:
        with pytest.raises(RuntimeError, match="StopIteration") as raised:
            await asyncio.wait_for(Threads("test", 1).run(next, iter(())), 60)
        assert isinstance(raised.value.__cause__, StopIteration)

    in_loop(work)


class Data:
    """What a request brings: its memory is free when nothing refers to it."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ends", ["with a result", "with an error", "with an error within a time", "withdrawn"])
def test_what_a_request_brought_is_freed_without_a_collection(hang: Hang, no_collection: None, ends: str) -> None:
    def compute(data: Data) -> Data:
        if ends == "withdrawn":
            hang()
            go_on()
        if ends != "with a result":
            raise ZeroDivisionError
        return data

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def one(pool: Threads) -> weakref.ref[Data]:
        data = Data()
        held = weakref.ref(data)
        work = pool.run(compute, data)
        if ends == "with a result":
            assert await work is data
        elif ends == "withdrawn":
            task = asyncio.ensure_future(work)
            await turns(lambda: hang.begun)
            task.cancel()
            await asyncio.wait({task})
            hang.go.set()
        else:
            call = Call({"path": "/", "method": "GET", "headers": []}, receive, None)  # type: ignore[arg-type]
            try:
                await (within(work, call, 60.0, "computed") if "time" in ends else work)
            except ZeroDivisionError:
                pass
            else:
                raise AssertionError("the error is lost")
        return held

    async def work() -> None:
        held = await one(Threads("test", 1))
        await turns(lambda: held() is None)

    in_loop(work)


def test_what_hangs_takes_no_thread_of_other_work(hang: Hang) -> None:
    async def work() -> None:
        pools = Pools()
        for pool in pools.every():
            stuck = [asyncio.ensure_future(pool.run(hang)) for _ in range(pool.most)]
            await turns(lambda pool=pool: len(pool.running()) == pool.most)
            for other in pools.every():
                if other is not pool:
                    assert await other.run(str, 1) == "1"
            assert any(line.startswith(pool.name) for line in pools.unfinished())
            hang.go.set()
            await asyncio.gather(*stuck)
            hang.go.clear()

    in_loop(work)


def test_what_has_not_begun_is_withdrawn_and_what_waits_is_bounded(hang: Hang) -> None:
    async def work() -> None:
        pool = Threads("test", 1, waiting=2)
        first = asyncio.ensure_future(pool.run(hang))
        await turns(lambda: hang.begun == 1)
        waiting = [asyncio.ensure_future(pool.run(hang)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Problem) as refused:
            await pool.run(hang)
        assert refused.value.status == 503 and refused.value.headers["Retry-After"]
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        last = asyncio.ensure_future(pool.run(str, "there is room again"))
        hang.go.set()
        assert await last == "there is room again" and await first == "done"
        assert hang.begun == 1, "withdrawn work was done"

    in_loop(work)


def test_a_burst_that_the_queues_have_room_for_finds_a_place(hang: Hang) -> None:
    pytest.importorskip("torch")
    from anytorch.text.generate.generator import TextGenerator

    generator = inspect.signature(TextGenerator).parameters
    room = {
        "texts": 1000,  # requests of one token each
        "prompts": generator["at_once"].default + generator["waiting"].default,
        "candles": queue.MOST_WAITING,
    }

    async def work() -> None:
        pools: Pools = create_app(ServeOptions(max_waiting_tokens=room["texts"], page=False)).state.service.pools
        for name, most in room.items():
            hang.go.clear()
            pool: Threads = getattr(pools, name)
            burst = [asyncio.ensure_future(pool.run(hang)) for _ in range(pool.most + most)]
            await turns(lambda pool=pool: len(pool.running()) == pool.most)
            hang.go.set()
            assert await asyncio.gather(*burst) == ["done"] * len(burst)

    in_loop(work)


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_pool_that_gets_no_thread_refuses_and_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        pool = Threads("test", 2)
        call = Call({"path": "/", "method": "GET", "headers": []}, None, None)  # type: ignore[arg-type]
        HOLDER.set(call)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            for _ in range(3):
                with pytest.raises(Problem) as refused:
                    await pool.run(str, 1)
                assert refused.value.status == 503 and refused.value.headers["Retry-After"]
                assert "no thread for test" in refused.value.detail
        await turns(lambda: not call.threads)
        assert await pool.run(str, 1) == "1" and not pool._waiting

    in_loop(work)


def test_a_pool_that_gets_no_second_thread_does_all_with_the_first(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        pool = Threads("test", 2)
        first = asyncio.ensure_future(pool.run(hang))
        await turns(lambda: hang.begun == 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            others = [asyncio.ensure_future(pool.run(str, number)) for number in range(3)]
            await asyncio.sleep(0)
        again = await asyncio.wait_for(pool.run(str, "a thread again"), 60)
        assert again == "a thread again", "the pool stays one thread short"
        assert await asyncio.gather(*others) == ["0", "1", "2"]
        hang.go.set()
        assert await first == "done"

    in_loop(work)


def test_abandoned_work_ends_where_it_looks() -> None:
    seen: list[str] = []
    go = threading.Event()

    def long_work() -> None:
        seen.append("begun")
        assert go.wait(120)
        try:
            go_on()
        except Abandoned:
            seen.append("ended")
            raise
        seen.append("went on")

    async def work() -> None:
        pool = Threads("test", 1)
        for leaves in (True, False):
            seen.clear()
            go.clear()
            task = asyncio.ensure_future(pool.run(long_work))
            await turns(lambda: seen)
            if leaves:
                task.cancel()
                await asyncio.wait({task})
            go.set()
            await turns(lambda: len(seen) == 2)
            assert seen == ["begun", "ended" if leaves else "went on"]
            await asyncio.wait({task})

    in_loop(work)
    go_on()  # outside of a thread of ours there is nobody to leave


@pytest.mark.parametrize("holds", [True, False])
def test_a_request_holds_its_memory_until_its_last_thread_has_ended(hang: Hang, holds: bool) -> None:
    given_back: list[int] = []

    async def work() -> None:
        pool = Threads("test", 2, holds=holds)
        call = Call({"path": "/", "method": "GET", "headers": []}, None, None, given_back.append)  # type: ignore[arg-type]
        call.body_nbytes = 7
        HOLDER.set(call)
        task = asyncio.ensure_future(pool.run(hang))
        await turns(lambda: hang.begun == 1)
        task.cancel()
        await asyncio.wait({task})
        call.end()
        assert given_back == ([] if holds else [7]), "the deadline frees nothing while a thread works"
        hang.go.set()
        await turns(lambda: given_back)
        assert given_back == [7]

    in_loop(work)


def test_a_thread_that_begins_after_its_request_gives_nothing_back_again() -> None:
    given_back: list[int] = []

    async def work() -> None:
        call = Call({"path": "/", "method": "GET", "headers": []}, None, None, given_back.append)  # type: ignore[arg-type]
        call.body_nbytes = 7
        HOLDER.set(call)
        call.end()
        assert await Threads("test", 1).run(str, 1) == "1"
        await turns(lambda: not call.threads)
        assert given_back == [7]

    in_loop(work)


def test_a_pool_is_stuck_when_all_its_threads_are_busy_for_too_long(hang: Hang) -> None:
    async def work() -> None:
        pool = Threads("test", 2, stuck_s=0.0)
        one = asyncio.ensure_future(pool.run(hang))
        await turns(lambda: hang.begun == 1)
        assert pool.stuck() == "", "another thread is free"
        two = asyncio.ensure_future(pool.run(hang))
        await turns(lambda: hang.begun == 2)
        assert "all 2 threads for test" in pool.stuck()
        hang.go.set()
        await asyncio.gather(one, two)
        await turns(lambda: pool.stuck() == "")

    in_loop(work)


def ask(service: Any, text: str, timeout_s: float = 60.0) -> httpx.Response:
    headers = {"X-Request-Timeout": str(timeout_s)}
    answer: httpx.Response = service.client.post("/v1/embeddings", json={"input": text}, headers=headers)
    return answer


def test_a_service_whose_threads_hang_serves_the_rest_and_says_so(serve: Callable[..., Any], hang: Hang) -> None:
    service = serve()
    pools, guard = service.state.pools, service.app.guard
    whole = guard._bodies_left
    real = service.embedding.engine.tokenize
    service.embedding.engine.tokenize = lambda texts, **options: real(texts) if len(texts[0]) < 100 else hang()
    while hang.begun < pools.texts.most:  # one whose time was up before a thread had begun with it is withdrawn
        assert ask(service, LONG, 0.05).status_code == 504
    assert hang.begun == len(pools.texts.running()) == pools.texts.most
    assert guard._bodies_left <= whole - pools.texts.most * len(LONG), "held while the threads work"
    assert ask(service, "short").status_code == 200
    for path in ("/metrics", "/v1/graphs", "/api/models", "/v1/healthz"):
        assert service.client.get(path).status_code == 200, path
    pools.texts._stuck_s = 0.0
    for path in ("/v1/healthz", "/v1/readyz"):
        answer = service.client.get(path)
        assert answer.status_code == 503 and "threads for texts" in answer.json()["detail"]
    hang.go.set()
    until(lambda: service.client.get("/v1/healthz").status_code == 200, "health to be green again")
    until(lambda: guard._bodies_left == whole, "the memory to be given back")
