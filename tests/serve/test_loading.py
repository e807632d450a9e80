"""Models that do not load, clients that leave while one does, and a service that stops in the middle of a request."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from anytorch.devices.choose import warn_fallback
from anytorch.errors import DeviceFallbackWarning
from anytorch.serve import models
from anytorch.serve.app import create_app
from anytorch.serve.loaders import told
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.text.embed import ArrowEngine


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def test_a_job_that_is_not_installed_does_not_fail_the_others() -> None:
    """Embeddings need no torch: a service without it does them, and says what the forecasts miss."""

    async def run() -> None:
        app = create_app(ServeOptions(threads=1))
        build = app.state.service.models._build

        def without_torch(wanted: Any) -> Any:
            if wanted.job == "forecast":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")
            return build(wanted)

        app.state.service.models._build = without_torch
        async with client_of(app) as client, app.router.lifespan_context(app):
            assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 200
            answer = await client.post("/v1/forecast", json={"sample": True, "horizon": 2})
            assert answer.status_code == 503 and answer.json()["type"].endswith("not-installed"), answer.text
            assert "anytorch[forecast]" in answer.json()["hint"]
            health = await client.get("/v1/readyz")
            assert health.status_code == 200
            assert health.json()["detail"] == "tiny cannot be loaded: No module named 'torch'"

    asyncio.run(run())


def test_a_model_that_fails_is_tried_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every request: building it may read gigabytes before it fails."""

    async def run() -> None:
        loading = create_app(ServeOptions(forecast=False)).state.service.models
        (slot,) = loading.slots("embeddings")
        now, built, broken = [100.0], [], True

        def build(wanted: Any) -> Any:
            built.append(now[0])
            if broken:
                raise OSError("the disk sleeps")
            return Engine(wanted)

        loading._build = build
        monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=lambda: now[0]))
        for _ in range(300):
            with pytest.raises(Problem, match="the disk sleeps") as caught:
                await loading.ready(slot)
            now[0] += 1.0
        assert built == [100.0, 105.0, 115.0, 135.0, 175.0, 235.0, 295.0, 355.0], "twice as long, up to a minute"
        frames = 0
        trace = caught.value.__traceback__
        while trace is not None:
            frames, trace = frames + 1, trace.tb_next
        assert frames < 20, "it remembers everybody who was told"
        broken = False
        now[0] += 60.0
        assert isinstance(await loading.ready(slot), Engine) and slot.error is None and slot.failures == 0

    asyncio.run(run())


class Engine:
    """What the registry needs to know of a model."""

    def __init__(self, wanted: Any) -> None:
        self.wanted, self.closed = wanted, threading.Event()

    def alive(self) -> str:
        return ""

    def close(self) -> None:
        self.closed.set()


def test_a_client_that_leaves_while_a_model_loads_leaks_nothing() -> None:
    async def run() -> None:
        registry = create_app(ServeOptions(forecast=False)).state.service.models
        begun, go_on, built = threading.Event(), threading.Event(), []

        def slow(wanted: Any) -> Any:
            begun.set()
            assert go_on.wait(120)
            built.append(Engine(wanted))
            return built[-1]

        registry._build = slow
        asked = [asyncio.ensure_future(registry.load("all-MiniLM-L6-v2", None, None, None)) for _ in range(3)]
        assert await asyncio.to_thread(begun.wait, 120)
        with pytest.raises(Problem, match="are waiting"):
            await registry.load("all-MiniLM-L6-v2", None, None, None)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert all(one.cancelled() for one in asked)
        go_on.set()
        await asyncio.wait(registry.swapping)
        assert len(built) == 1 and registry.loaded("embeddings") == built, (
            "what had begun has its place, the rest is gone"
        )
        await registry.close()
        assert built and all(engine.closed.is_set() for engine in built)

    asyncio.run(run())


def test_the_deadline_and_the_client_count_while_the_model_loads() -> None:
    """A model that takes minutes must not keep those who would not wait, nor those who have gone."""

    async def run() -> None:
        app = create_app(ServeOptions(forecast=False, threads=1))
        service, go_on = app.state.service, threading.Event()
        build = service.models._build

        def slow(wanted: Any) -> Any:
            assert go_on.wait(120)
            return build(wanted)

        service.models._build = slow
        async with client_of(app) as client, app.router.lifespan_context(app):
            answer = await client.post("/v1/embeddings", json={"input": "x"}, headers={"X-Request-Timeout": "0.05"})
            assert answer.status_code == 504 and "within 0.05 s" in answer.json()["detail"], answer.text
            patient = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": "x"}))
            messages = [{"type": "http.request", "body": b'{"input":"x"}'}, {"type": "http.disconnect"}]

            async def receive() -> Any:
                return messages.pop(0)

            async def send(message: Any) -> None:
                raise AssertionError("nobody is there")

            scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [(b"host", b"localhost")],
                     "client": ("127.0.0.1", 1)}  # fmt: skip
            await asyncio.wait_for(app(scope, receive, send), 120)
            (slot,) = service.models.slots("embeddings")
            assert slot.model is None and slot.users == 1, "the patient one alone is left"
            go_on.set()
            assert (await patient).status_code == 200

    asyncio.run(run())


def test_a_deadline_that_is_over_before_the_queue_has_the_request() -> None:
    async def run() -> None:
        app = create_app(ServeOptions(forecast=False, threads=1))
        async with client_of(app) as client, app.router.lifespan_context(app):
            assert (await client.post("/v1/embeddings", json={"input": "x"})).status_code == 200
            answer = await client.post("/v1/embeddings", json={"input": "x"}, headers={"X-Request-Timeout": "1e-06"})
            assert answer.status_code == 504 and "within 1e-06 s" in answer.json()["detail"], answer.text
            (model,) = app.state.service.models.loaded("embeddings")
            assert model.queue.stats.requests == 1, "what is late anyway is not queued"
            body = {"input": ["some words " * 20_000]}
            answer = await client.post("/v1/embeddings", json=body, headers={"X-Request-Timeout": "0.001"})
            assert answer.status_code == 504 and model.queue.stats.requests == 1

    asyncio.run(run())


def test_a_request_that_outlives_the_drain_gets_a_status() -> None:
    async def run() -> None:
        app = create_app(ServeOptions(forecast=False))
        sent: list[Any] = []
        never = asyncio.Event()

        async def receive() -> Any:
            await never.wait()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-length", b"10")]  # a body that does not come
        scope = {
            "type": "http", "method": "POST", "path": "/v1/similarity", "headers": headers, "query_string": b"",
            "client": ("127.0.0.1", 1), "http_version": "1.1", "scheme": "http", "raw_path": b"/v1/similarity",
        }  # fmt: skip
        task = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        assert sent[0]["status"] == 503 and b"stopping" in sent[1]["body"]

    asyncio.run(run())


def test_a_closed_engine_gives_its_memory_back_at_once() -> None:
    """Not when the garbage collector next comes by: a service swaps models, and a GPU has room for one."""
    engine = ArrowEngine(device="cpu", threads=1)
    engine.encode(["one text"])
    gone = weakref.ref(engine)
    gc.disable()
    try:
        engine.close()
        del engine
        assert gone() is None, "something of the engine's own keeps it"
    finally:
        gc.enable()


def test_overlapping_loads_leave_the_warning_filters_alone() -> None:
    """`warnings.catch_warnings` is the whole process's: blocks that overlap in threads leave its filters changed."""
    inside, entered = threading.Barrier(2), threading.Event()
    before = list(warnings.filters)
    answers: dict[str, tuple[str, str]] = {}

    def load(name: str, first: bool) -> None:
        def make() -> str:
            warn_fallback(f"{name} fell back")
            inside.wait(20)
            if not first:
                assert entered.wait(20), "the other one leaves first"
            return name

        answers[name] = told(make)
        entered.set()

    threads = [threading.Thread(target=load, args=(name, name == "a")) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {"a": ("a", "a fell back"), "b": ("b", "b fell back")}
    assert list(warnings.filters) == before
    with pytest.warns(DeviceFallbackWarning, match="outside"):
        warn_fallback("outside")
