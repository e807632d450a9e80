"""Requests on their way: deadlines, clients that leave, a full queue, draining, swapping models under traffic."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tests.waiting import until

from anytorch.serve import running as protocol


def ask(service: Any, text: str = "x", **options: Any) -> httpx.Response:
    response: httpx.Response = service.client.post("/v1/embeddings", json={"input": text}, **options)
    return response


def post(service: Any, body: bytes, path: str = "/v1/embeddings") -> socket.socket:
    """A request on a connection of its own, whose answer nobody reads."""
    made = socket.create_connection(("127.0.0.1", service.port), timeout=120)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


@pytest.fixture
def held(serve: Callable[..., Any], gate: Callable[[Any], Any]) -> Any:
    """A service whose engine is busy with a first request until the gate is opened."""
    service = serve(max_waiting_tokens=40)
    service.gate = gate(service)
    service.pool = ThreadPoolExecutor(16)
    service.first = service.pool.submit(ask, service, "first")
    assert service.gate.waiting.wait(120)
    yield service
    service.gate.open.set()
    service.pool.shutdown()


def test_a_deadline_is_kept_while_the_engine_is_busy(held: Any) -> None:
    began = time.monotonic()
    answer = ask(held, "late", headers={"X-Request-Timeout": "0.2"})
    assert answer.status_code == 504 and answer.json()["type"].endswith(":deadline")
    assert time.monotonic() - began < 60  # and not when the gate gives up
    similar = held.client.post("/v1/similarity", json={"a": ["x"]}, headers={"X-Request-Timeout": "0.2"})
    assert similar.status_code == 504
    held.gate.open.set()
    assert held.first.result().status_code == 200
    until(lambda: held.embedding.queue.stats.waiting_requests == 0, "the late ones to be taken out")
    assert held.gate.batches == 1, "a request whose time was up was computed all the same"
    assert held.state.metrics.registry.get_sample_value("anytorch_rejected_total", {"reason": "deadline"}) == 2


def test_a_request_without_a_body_has_a_deadline_too(serve: Callable[..., Any]) -> None:
    service = serve()

    async def never(**_: Any) -> Any:
        await asyncio.Event().wait()

    service.state.surveys.survey = never
    answer = service.client.get("/v1/devices?refresh=true", headers={"X-Request-Timeout": "0.1"})
    assert answer.status_code == 504 and "0.1 s" in answer.json()["detail"]
    with socket.create_connection(("127.0.0.1", service.port), timeout=120) as made:
        made.sendall(b"GET /v1/devices HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: service.app.guard.under_way == 1, "the request to be under way")
    until(lambda: service.app.guard.under_way == 0, "the service to notice that the client has gone")


def at_once(tokens: Any) -> Callable[[], Any]:
    """In the place of an engine's `start_tokens`, where the answer's size matters and not what is in it."""
    return lambda: np.full((len(tokens.starts) - 1, 384), 0.1234567, np.float32)


def unread(service: Any, room: int = 4096) -> socket.socket:
    """A request for megabytes from a client that has little room and has not begun to read."""
    service.embedding.engine.start_tokens = at_once
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    made.settimeout(120)
    made.connect(("127.0.0.1", service.port))
    body = json.dumps({"input": ["x"] * 2048}).encode()
    made.sendall(b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    return made


class Ever(dict[Any, None]):
    """Connections whose answers wait to be read, and in `all` those, too, that no longer do."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def __setitem__(self, one: Any, value: None) -> None:
        super().__setitem__(one, value)
        if one not in self.all:
            self.all.append(one)


def unread_ones(service: Any, monkeypatch: pytest.MonkeyPatch) -> Ever:
    made = Ever()
    monkeypatch.setattr(service.server.config.http_protocol_class, "unread", made)
    return made


def test_an_answer_that_nobody_reads_is_let_go(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(body_timeout_s=0.5)
    connections, waiting = service.server.server_state.connections, unread_ones(service, monkeypatch)
    with unread(service) as made:
        until(lambda: waiting.all, "the answer to wait")
        (mine,) = waiting.all
        until(lambda: mine not in connections, "the connection to be let go")
        assert not waiting and made.fileno() > 0
    until(lambda: ask(service).status_code == 200, "others to be answered")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell what it holds")
def test_a_slow_reader_gets_its_whole_answer(serve: Callable[..., Any]) -> None:
    service = serve(body_timeout_s=1.5)
    with unread(service, room=100_000) as made:
        found = made.recv(65536)
        head, _, body = found.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        end = time.monotonic() + 3.5  # more than two looks at it
        while len(body) < length:
            part = made.recv(65536)
            assert part, f"cut off after {len(body)} of {length} bytes"
            body += part
            if time.monotonic() < end:
                time.sleep(0.02)
        assert len(json.loads(body)["data"]) == 2048
        until(
            lambda: not any(one.unread for one in list(service.server.server_state.connections)), "it to be forgotten"
        )


def test_unread_answers_are_bounded_together(serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "UNREAD_AT_ONCE", 2)
    service = serve(max_body_nbytes=2_000_000)  # so 4 MB may wait to be read
    connections, waiting = service.server.server_state.connections, unread_ones(service, monkeypatch)
    with unread(service) as old:
        until(lambda: waiting.all, "an answer to wait")
        with unread(service):
            until(lambda: waiting.all[0] not in connections, "the older one to be let go")
            assert waiting.all[1] in waiting and waiting.all[1] in connections, "the newer one is kept"
        assert old.fileno() > 0


def test_a_full_queue_says_when_to_come_again(held: Any) -> None:
    waiting = [held.pool.submit(ask, held, "one two three four five six") for _ in range(5)]
    until(lambda: held.embedding.queue.stats.waiting_tokens > 30, "the queue to fill")
    answer = ask(held, "one two three four five six seven eight")
    assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    assert answer.json()["type"].endswith(":queue-full") and answer.json()["error"]["type"] == "rate_limit_error"
    assert held.state.metrics.registry.get_sample_value("anytorch_rejected_total", {"reason": "queue-full"}) == 1
    held.gate.open.set()
    assert {one.result().status_code for one in waiting} == {200}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/embeddings", b'{"input":"gone"}'), ("/v1/similarity", b'{"a":["gone"]}')]
)
def test_a_client_that_leaves_is_not_computed_for(held: Any, path: str, body: bytes) -> None:
    connection = post(held, body, path)
    until(lambda: held.embedding.queue.stats.waiting_requests == 1, "the request to wait")
    connection.close()
    until(lambda: held.app.guard.under_way == 1, "the service to notice")
    held.gate.open.set()
    assert held.first.result().status_code == 200
    until(lambda: held.embedding.queue.stats.cancelled == 1, "the queue to let it go")
    assert held.gate.batches == 1
    assert (
        held.state.metrics.registry.get_sample_value("anytorch_requests_total", {"route": path, "status": "499"}) == 1
    )


def test_draining_finishes_what_is_under_way(serve: Callable[..., Any], gate: Callable[[Any], Any]) -> None:
    service = serve(drain_s=120, drain_delay_s=2.0)
    closed = gate(service)
    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=service.url, timeout=120) as other:
        waiting = [pool.submit(ask, service, f"text {n}") for n in range(3)]
        assert closed.waiting.wait(120)
        until(lambda: service.app.guard.under_way == 3, "three requests")
        service.drain()
        unready = other.get("/v1/readyz")
        assert unready.status_code == 503 and unready.json()["status"] == "draining"
        assert other.get("/v1/healthz").status_code == 200
        until(lambda: service.server.should_exit, "the delay to pass")
        time.sleep(0.3)
        assert service.thread.is_alive(), "it ended with requests under way"
        closed.open.set()
        assert {one.result().status_code for one in waiting} == {200}
    service.thread.join(120)
    assert not service.thread.is_alive()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", service.port), timeout=2)


def test_a_model_is_swapped_without_a_lost_request(serve: Callable[..., Any]) -> None:
    pytest.importorskip("torch")  # without it there is no device to tell of
    service = serve()
    stop = threading.Event()
    statuses: list[int] = []

    def hammer(number: int) -> None:
        with httpx.Client(base_url=service.url, timeout=120) as client:
            while not stop.is_set():
                answer = client.post("/v1/embeddings", json={"input": f"text {number}"})
                statuses.append(answer.status_code)

    first = service.embedding
    threads = [threading.Thread(target=hammer, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for quantization in ("int8", None, "int8"):
            body = {"model": "all-MiniLM-L6-v2", "quantization": quantization, "device": "cpu"}
            answer = service.client.post("/api/load-model", json=body)
            assert answer.status_code == 200, answer.text
            document = answer.json()
            assert document["model"]["quantization"] == quantization and document["device"] == "cpu"
            assert document["device_info"]["device_type"] == "cpu" and document["model"]["default"]
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert set(statuses) == {200} and len(statuses) > 4
    assert service.embedding is not first
    until(lambda: first.queue.closing, "the first engine to be closed")
    assert [info["id"] for info in service.client.get("/v1/readyz").json()["models"]["embeddings"]] == [
        "all-MiniLM-L6-v2"
    ]


def test_a_swap_lets_the_old_engine_finish(held: Any) -> None:
    old = held.embedding
    assert held.client.post("/api/load-model", json={"model": "all-MiniLM-L6-v2"}).status_code == 200
    assert held.embedding is not old
    assert ask(held, "on the new engine").status_code == 200  # the old one is still held
    assert not old.queue.closing, "closed with a request under way"
    held.gate.open.set()
    assert held.first.result().status_code == 200
    until(lambda: old.queue.closing, "the old engine to be closed")


def test_healthz_is_red_when_an_engine_hangs(held: Any) -> None:
    assert held.client.get("/v1/healthz").status_code == 200
    held.embedding.queue.stuck = lambda: "a batch has not come back for 121 s"
    for path in ("/v1/healthz", "/v1/readyz"):
        answer = held.client.get(path)
        assert answer.status_code == 503 and answer.json()["status"] == "failed"
        assert "121 s" in answer.json()["detail"]


def test_more_requests_than_may_be_under_way(serve: Callable[..., Any], gate: Callable[[Any], Any]) -> None:
    service = serve(max_connections=2)
    closed = gate(service)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(ask, service) for _ in range(2)]
        until(lambda: service.app.guard.under_way == 2, "two requests")
        answer = ask(service)
        assert answer.status_code == 503 and answer.json()["type"].endswith(":busy")
        closed.open.set()
        assert {one.result().status_code for one in waiting} == {200}
