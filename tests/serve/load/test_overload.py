"""More requests than it can answer: every one gets a status, those it takes are answered in time, and it recovers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.serve.load.conftest import load_bench

TIMEOUT_S = 60.0  # a request that is taken is answered by then


@pytest.fixture(scope="module")
def small(start: Callable[..., Any]) -> Any:
    """A service with a short queue."""
    return start(max_waiting_tokens=2000, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, missing: Callable[[str, str], NoReturn]) -> Any:
    pytest.importorskip("numpy")
    if shutil.which("cc") is None:
        missing("compiler", "the load generator is compiled")
    module = load_bench("load")
    module.program = module.client_program(tmp_path_factory.mktemp("client"))
    return module


def test_beyond_its_capacity_it_refuses_and_answers_what_it_takes(small: Any, load: Any, tmp_path: Path) -> None:
    service = small
    bodies = [json.dumps({"input": f"a text of some length, number {n}, " * 8}).encode() for n in range(50)]
    load.write_requests(tmp_path / "requests", [load.request_bytes("/v1/embeddings", body) for body in bodies])
    run = load.run_client(
        load.program, service.port, tmp_path / "requests", connections=150, seconds=3, timeout_s=2 * TIMEOUT_S
    ).summary()
    assert set(run["statuses"]) == {"200", "429"}, run
    assert run["statuses"]["200"] > 10, run
    assert run["max_ms"] < 1000 * TIMEOUT_S, run
    status, body = service.ask(body={"input": "afterwards"})
    assert status == 200 and len(body["data"]) == 1


def test_the_refusal_says_when_to_come_again(small: Any) -> None:
    import http.client
    import threading

    service = small
    stop = threading.Event()

    def fill() -> None:
        while not stop.is_set():
            service.ask(body={"input": ["some words that have to be computed " * 20] * 20})

    threads = [threading.Thread(target=fill) for _ in range(6)]
    for thread in threads:
        thread.start()
    refused = None
    try:
        for _ in range(300):
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
            connection.request(
                "POST", "/v1/embeddings", json.dumps({"input": ["x " * 100] * 20}), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            if answer.status == 429:
                refused = (dict(answer.getheaders()), json.loads(body))
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert refused is not None
    headers, problem = refused
    lowered = {name.lower(): value for name, value in headers.items()}
    assert int(lowered["retry-after"]) >= 1
    assert lowered["content-type"].startswith("application/problem+json")
    assert problem["status"] == 429 and problem["error"]["message"]
