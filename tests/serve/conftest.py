"""A real service on a free port, in a thread: what clients meet, sockets and all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from tests.waiting import until

from anytorch.serve.app import Service, create_app
from anytorch.serve.options import ServeOptions
from anytorch.serve.running import Server, protocol_class
from anytorch.serve.server import bind

# Compiled code outlives the test run: only the first one on a machine pays for it.
CACHE = Path(__file__).parents[2] / ".cache" / "serve-tests" / os.environ.get("PYTEST_XDIST_WORKER", "alone")


class Running:
    """A service that runs, its app, and a client that talks to it."""

    def __init__(self, options: ServeOptions) -> None:
        self.listening: socket.socket = bind(options)
        self.port: int = self.listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app: Service = create_app(options)
        config = uvicorn.Config(
            self.app, http=protocol_class(options), ws="none", lifespan="on", log_config=None, access_log=False,
            timeout_graceful_shutdown=max(1, round(options.drain_s)), server_header=False,
        )  # fmt: skip
        self.server = Server(config, self.app, options.drain_delay_s, None)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listening]})
        self.client = httpx.Client(base_url=self.url, timeout=120)

    @property
    def state(self) -> Any:
        return self.app.state.service

    def start(self) -> None:
        self.thread.start()
        until(lambda: self.server.started, "the server to start")

    def ready(self) -> Running:
        until(lambda: self.client.get("/v1/readyz").status_code == 200, "the service to be ready")
        return self

    def drain(self) -> None:
        """What SIGTERM does."""
        self.server.handle_exit(15, None)

    def stop(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive(), "the service does not end"

    @property
    def embedding(self) -> Any:
        return self.state.models.loaded("embeddings")[0]


class Gate:
    """Holds an engine's batches back until it is opened."""

    def __init__(self, engine: Any) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.batches = 0
        real = engine.start_tokens

        def start_tokens(tokens: Any) -> Callable[[], Any]:
            self.batches += 1
            self.waiting.set()
            assert self.open.wait(120), "the gate was never opened"
            answer: Callable[[], Any] = real(tokens)
            return answer

        engine.start_tokens = start_tokens


@contextmanager
def serving(**options: Any) -> Iterator[Running]:
    running = Running(ServeOptions(**{"port": 0, "forecast": False, "text": False, "threads": 1, **options}))
    running.start()
    try:
        yield running.ready()
    finally:
        running.stop()


@pytest.fixture(autouse=True)
def built_cache(isolation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(CACHE))


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """`serve(max_texts=2)`: a service with these options, ended with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(**options))


@contextmanager
def served_with(**options: Any) -> Iterator[Running]:
    """`serving` for a fixture that outlives a test: started with the shared cache, whatever the test has."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ANYTORCH_CACHE_DIR", str(CACHE))
            running = stack.enter_context(serving(**options))
        yield running


@pytest.fixture(scope="session")
def served() -> Callable[..., Any]:
    return served_with


class Shared:
    """Services that many tests use one after the other, by name. They end with the last test of this folder, and not with
    the session: what other tests fork or measure has nothing to do with their threads."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._running: dict[str, Running] = {}

    def get(self, name: str, **options: Any) -> Running:
        if name not in self._running:
            self._running[name] = self._stack.enter_context(served_with(**options))
        return self._running[name]

    def close(self) -> None:
        self._running.clear()
        self._stack.close()


shared = Shared()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        shared.close()


@pytest.fixture
def service() -> Running:
    """One service with the default options for all tests that leave it as it was."""
    return shared.get("service")


@pytest.fixture
def forecaster() -> Running:
    """The same with the embedded forecasting model, and no other."""
    return shared.get("forecaster", models=("tiny",), forecast=True)


@pytest.fixture
def gate() -> Callable[[Running], Gate]:
    return lambda running: Gate(running.embedding.engine)
