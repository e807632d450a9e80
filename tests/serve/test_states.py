"""The service in-process under random orders of loads, requests, answers, failures, clients that leave, and the drain.

The engines are made up, so that each step is chosen: a build or a batch ends when a rule says so. What must hold is written
as invariants and at the end of each run: every request gets one status, from the engine it began with; no engine is closed
while a request uses it, and every one is closed once; what requests hold of memory and threads is given back.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from anytorch.errors import ModelError, QueueClosed
from anytorch.serve.app import create_app
from anytorch.serve.loaders import EmbeddingModel, Wanted, info_of
from anytorch.serve.options import ServeOptions
from anytorch.text.embed.tokens import Tokens

PLACES = st.integers(0, 3)  # of a request, from the newest
NAMES = st.sampled_from(["a", "b", "c"])
LONG = "word " * 2000  # is tokenized in a thread
PATIENCE = 2000  # turns of the event loop, 5 ms each


class MadeUp(EmbeddingModel):
    """An embedding model whose batches end when a rule says so."""

    def __init__(self, wanted: Wanted, machine: Service) -> None:
        self.info = info_of(wanted, device="cpu", dim=2, max_length=8)
        self.vocabulary = 10
        self.waiting: list[Future[Any]] = []
        self.closed = 0
        self._machine = machine
        self.engine: Any = SimpleNamespace(tokenize=self._tokenize, max_length=8)
        self.queue: Any = SimpleNamespace(submit_tokens=self._submit, stuck=lambda: "", stats=None)

    def _tokenize(self, texts: list[str], **_: Any) -> Tokens:
        if len(texts[0]) > 100:
            self._machine.tokenizing += 1
            assert self._machine.tokenized.wait(120)
        return Tokens(np.zeros(len(texts), np.int32), np.arange(len(texts) + 1, dtype=np.int32), 0)

    def _submit(self, tokens: Tokens, **_: Any) -> Future[Any]:
        assert not self.closed or self._machine.draining, "a request reached an engine that was closed"
        if self.closed:
            raise QueueClosed("it is closed")
        self.waiting.append(Future())
        return self.waiting[-1]

    def compute(self) -> None:
        for future in self.waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(np.zeros((1, 2), np.float32))
        self.waiting.clear()

    def close(self) -> None:
        left = [future for future in self.waiting if not future.done()]
        assert not left or self._machine.draining, "closed while a request uses it"
        self.compute()
        self.closed += 1


class Client:
    """One request and what became of it."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        sent = {"host": "localhost", "content-type": "application/json", **(headers or {})}
        self._scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()], "client": ("127.0.0.1", 1),
            "scheme": "http", "http_version": "1.1", "server": ("localhost", 80), "asgi": {"version": "3.0"},
        }  # fmt: skip
        self._body: bytes | None = json.dumps(body).encode()
        self._left = asyncio.Event()
        self.status: list[int] = []
        self.answer = b""
        self.expects = ""
        self.left = False
        self.task = asyncio.ensure_future(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status.append(message["status"])
        else:
            self.answer += message.get("body", b"")

    def leave(self) -> None:
        self.left = self.left or not self.task.done()
        self._left.set()


class Service(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.app = create_app(ServeOptions(forecast=False, timeout_s=600))
        self.state: Any = self.app.state.service
        self.built: list[MadeUp] = []
        self.builds: list[tuple[Wanted, Future[None]]] = []
        self.tokenized = threading.Event()
        self.tokenized.set()
        self.tokenizing = 0
        self.draining = False
        self.requests: list[Client] = []
        self.loads: list[Client] = []
        self.state.models._build = self._build
        self.state.models._wanted = lambda name, job: Wanted(name, "embeddings", None)
        self.room = self.app.guard._bodies_left

    def _build(self, wanted: Wanted) -> MadeUp:
        if self.built:  # the first is there at once
            gate: Future[None] = Future()
            self.builds.append((wanted, gate))
            gate.result(120)
        self.built.append(MadeUp(wanted, self))
        return self.built[-1]

    def until(self, happens: Callable[[], object]) -> None:
        async def turn() -> None:
            for _ in range(PATIENCE):
                if happens():
                    return
                await asyncio.sleep(0.005)
            raise AssertionError("it did not happen")

        self.loop.run_until_complete(turn())

    def turn(self) -> None:
        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)

        self.loop.run_until_complete(turns())

    def send(self, *arguments: Any, **options: Any) -> Client:
        async def make() -> Client:
            return Client(self.app, *arguments, **options)

        return self.loop.run_until_complete(make())

    @property
    def default(self) -> str:
        return str(self.state.models.lineup("embeddings").default)

    # --- what can happen ---------------------------------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        self.loop.call_soon(self.state.start)
        self.until(lambda: self.state.models.loaded("embeddings"))

    @rule(long=st.booleans(), held=st.booleans())
    def request(self, long: bool, held: bool) -> None:
        if long:
            (self.tokenized.clear if held else self.tokenized.set)()
        one = self.send("/v1/embeddings", {"input": LONG if long else "x"})
        one.expects = self.default
        self.requests.append(one)
        self.turn()

    @rule()
    def finish_tokenizing(self) -> None:
        self.tokenized.set()
        self.turn()

    @rule()
    def compute(self) -> None:
        for model in self.built:
            model.compute()
        self.turn()

    @rule(place=PLACES)
    def leave(self, place: int) -> None:
        for one in self.requests[-1 - place :][:1]:
            one.leave()
        self.turn()

    @rule()
    def deadline(self) -> None:
        """One whose time is up while it is tokenized."""
        self.tokenized.clear()
        one = self.send("/v1/embeddings", {"input": LONG}, {"x-request-timeout": "0.001"})
        self.until(one.task.done)
        assert one.status in ([504], [503]), one.status

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        self.loads.append(self.send("/api/load-model", {"model": name}))
        self.turn()

    @rule(works=st.booleans())
    def finish_build(self, works: bool) -> None:
        if not self.builds:
            return
        wanted, gate = self.builds.pop(0)
        before, count = self.default, len(self.built)
        if works:
            gate.set_result(None)
            self.until(lambda: len(self.built) > count and self.default == wanted.id)
        else:
            gate.set_exception(ModelError("made to fail"))
            self.turn()
            assert self.default == before, "a model that was not loaded took a place"

    @rule(place=PLACES)
    def leave_while_loading(self, place: int) -> None:
        for one in self.loads[-1 - place :][:1]:
            one.leave()
        self.turn()

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        assert all(model.closed <= 1 for model in self.built), "an engine was closed twice"
        assert all(not model.closed for model in self.state.models.loaded("embeddings")), "a closed engine has a place"
        assert all(slot.users >= 0 for slot in self.state.models.slots("embeddings"))
        guard = self.app.guard
        assert guard.under_way == sum(not one.task.done() for one in self.requests + self.loads)
        assert 0 <= guard._bodies_left <= self.room
        for one in self.requests:
            if one.task.done():
                one.task.result()  # nothing but an answer comes out of the app
                assert len(one.status) == (0 if one.left else 1) or (one.left and one.status == [200]), one.status
                if one.status == [200]:
                    assert json.loads(one.answer)["model"] == one.expects, (
                        "answered by another engine than it began with"
                    )

    def teardown(self) -> None:
        try:
            self.draining = True
            self.tokenized.set()
            while self.builds:
                self.builds.pop()[1].set_exception(ModelError("stopped"))
            stopping = self.loop.create_task(self.state.stop())
            self.until(stopping.done)
            stopping.result()
            for model in self.built:
                model.compute()
            for one in self.requests + self.loads:
                one.leave()

            def all_over() -> bool:
                while self.builds:  # one that waited for its turn
                    self.builds.pop()[1].set_exception(ModelError("stopped"))
                for model in self.built:
                    model.compute()
                return all(one.task.done() for one in self.requests + self.loads) and not self.state.pools.unfinished()

            self.until(all_over)
            self.until(lambda: self.app.guard._bodies_left == self.room)
            self.until(lambda: all(model.closed for model in self.built))
            for _ in range(5):
                self.turn()
                self.until(lambda: not self.state.pools.unfinished())
            assert all(model.closed == 1 for model in self.built), "an engine was closed twice"
            assert self.app.guard.under_way == 0
        finally:
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()


TestService = Service.TestCase
TestService.settings = settings(
    max_examples=12, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
