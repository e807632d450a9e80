"""The real service in processes of its own, for tests that attack it."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi")

from anytorch.serve.options import ServeOptions, to_json

ROOT = Path(__file__).parents[3]
# Compiled code outlives the test run, as for the other tests of the service.
CACHE = ROOT / ".cache" / "serve-tests" / os.environ.get("PYTEST_XDIST_WORKER", "alone")
START = """
import sys
from anytorch.serve.options import from_json
from anytorch.serve.server import serve
sys.exit(serve(from_json(sys.argv[1]), lambda started: print("READY", started.url, flush=True)))
"""


def load_bench(name: str) -> ModuleType:
    """A module of bench/, by its path."""
    path = ROOT / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"anytorch_bench_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Service:
    """A running service."""

    def __init__(self, options: ServeOptions, folder: Path) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self.options = replace(options, port=self.port)
        env = {**os.environ, "ANYTORCH_CACHE_DIR": str(CACHE), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self.log = (folder / f"log-{self.port}").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, to_json(self.options)], stdout=subprocess.PIPE, stderr=self.log, env=env
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"READY"), self.words()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def words(self) -> str:
        return Path(self.log.name).read_text()[-3000:]

    def ask(self, path: str = "/v1/embeddings", body: Any = None, timeout_s: float = 120.0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, sent, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def children(self) -> list[int]:
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.log.close()


@pytest.fixture(scope="session")
def malformed() -> ModuleType:
    pytest.importorskip("schemathesis")
    return load_bench("malformed")


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Iterator[Callable[..., Service]]:
    """`start(**options)`: a service with these ServeOptions. All are stopped at the end, and must end well."""
    folder = tmp_path_factory.mktemp("served")
    running: list[Service] = []

    def make(**options: Any) -> Service:
        service = Service(ServeOptions(**{"forecast": False, "device": "cpu", **options}), folder)
        running.append(service)
        return service

    yield make
    for service in running:
        service.stop()


@pytest.fixture(scope="session")
def service(start: Callable[..., Service]) -> Service:
    """One service for all tests that leave it as it was; impatient with slow clients."""
    return start(header_timeout_s=1.0, body_timeout_s=1.5, max_body_nbytes=2**20, max_texts=64)
