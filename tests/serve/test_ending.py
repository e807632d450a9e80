"""SIGTERM ends the service in every state: real processes, started together so that they wait for each other."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from tests.serve.hanging import STATES
from tests.serve.starting import start_line
from tests.waiting import until

from anytorch.serve import server
from anytorch.serve.options import ServeOptions
from anytorch.serve.running import Server

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
ROOT = Path(__file__).parents[2]
WORKERS = "hung thread in a worker"


class Service:
    def __init__(self, state: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.serve.hanging", state, "--port", "0", "--json", "--threads", "1"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(
            [*command, "--no-forecast", "--drain", "0", *arguments], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.client: httpx.Client | None = None

    def ready(self) -> httpx.Client:
        if self.client is None:
            self.client = httpx.Client(base_url=start_line(self.process)["url"], timeout=120)
        return self.client

    def begin(self, path: str, body: dict[str, object]) -> None:
        """Send a request that is not answered before the end."""

        def post() -> None:
            try:
                with self.ready().stream("POST", path, json=body) as answer:
                    for _ in answer.iter_raw():
                        pass
            except httpx.HTTPError:
                pass  # the process has ended

        threading.Thread(target=post, daemon=True).start()

    def end(self) -> tuple[int, str]:
        """Its status and what it said. It hangs for ever, so that the limit says nothing about speed."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=120)[1]
        return self.process.returncode, said


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Service]]:
    made = {state: Service(state) for state in STATES} | {WORKERS: Service("hung thread", "--workers", "2")}
    yield made
    for one in made.values():
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()
        if one.client is not None:
            one.client.close()


def under_way(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith("anytorch_requests_under_way")).split()[1])) - 1


@pytest.mark.parametrize("state", STATES)
def test_it_ends(services: dict[str, Service], state: str) -> None:
    service = services[state]
    client = service.ready()
    if state == "loading":
        service.begin("/api/load-model", {"model": "all-MiniLM-L6-v2", "quantization": "int8"})
    elif state == "computing":
        service.begin("/v1/embeddings", {"input": "word " * 200})
    elif state == "streaming":
        service.begin("/v1/benchmark", {"seconds": 1})
    elif state == "hung thread":
        hang_a_thread(client)
    if state in ("loading", "computing", "streaming"):
        until(lambda: under_way(client) == 1, "the request to be under way")
    status, said = service.end()
    assert status == 0, said
    assert "Traceback" not in said or state == "streaming", said  # uvicorn tells of an answer that was cut off
    assert ("still computed" in said) == (state in ("hung thread", "loading", "computing", "hung end")), said


def hang_a_thread(client: httpx.Client) -> None:
    answer = client.post("/v1/embeddings", json={"input": "x" * 5000}, headers={"X-Request-Timeout": "0.1"})
    assert answer.status_code == 504


def test_workers_end_with_a_hung_thread(services: dict[str, Service]) -> None:
    service = services[WORKERS]
    hang_a_thread(service.ready())
    status, said = service.end()
    assert status == 0 and "still computed" in said, said
    assert "did not end: killed" not in said, "the worker ends by itself, and says what it was doing"


class Deaf:
    """A worker's process that no signal but SIGKILL ends; waiting for it takes as long as is allowed."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.pid, self.killed, self.told = clock, 1, False, list[int]()

    def send_signal(self, number: int) -> None:
        self.told.append(number)

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float | None = None) -> int:
        if self.killed:
            return -signal.SIGKILL
        assert timeout is not None, "nobody may wait for ever"
        self.clock[0] += timeout
        raise subprocess.TimeoutExpired("worker", timeout)


@pytest.mark.parametrize("workers", [2, 40])
def test_workers_that_hear_nothing_are_killed_in_time(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """However many there are, the service has ended 5 s after the time to drain, with half a second for looking."""
    clock = [100.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: clock[0])
    deaf = [Deaf(clock) for _ in range(workers)]
    with socket.socket() as listening:
        one = server.Supervisor(ServeOptions(workers=workers, drain_s=7.0), listening, Path(), 0)
        for number, process in enumerate(deaf):
            one._workers.append(server.WorkerProcess(number, cast(Any, process), os.dup(0)))
        one._drain()
    assert all(process.killed and process.told == [signal.SIGTERM] for process in deaf)
    assert 7.0 <= clock[0] - 100.0 <= 7.0 + 5.0 - 0.5


def leaving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "anytorch-leave"]


def drained(*, leave_s: float) -> tuple[Server, Any]:
    state = SimpleNamespace(draining=False)
    app: Any = SimpleNamespace(state=SimpleNamespace(service=state))
    return Server(uvicorn.Config(app, log_config=None), app, 0.0, None, leave_s), state


@pytest.mark.parametrize("stream", [None, io.StringIO(), object()], ids=["none", "no file", "no stream"])
def test_a_signal_drains_whatever_standard_error_is(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    def start(_: Any) -> None:
        raise AssertionError("a handler waits for a lock that the code it interrupts may have")

    server, state = drained(leave_s=3600.0)
    with server.capture_signals():
        (thread,) = leaving()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", stream)
                patch.setattr(threading.Thread, "start", start)
                server.handle_exit(signal.SIGTERM, None)
                server.handle_exit(signal.SIGTERM, None)
            assert state.draining and server.should_exit and thread.is_alive()
        finally:
            server.ended.set()
            thread.join(120)
            faulthandler.cancel_dump_traceback_later()
    assert not thread.is_alive()


def test_the_thread_that_waits_for_a_signal_ends_without_one() -> None:
    server, state = drained(leave_s=3600.0)
    with server.capture_signals():
        (thread,) = leaving()
    thread.join(120)
    assert not thread.is_alive() and not state.draining
