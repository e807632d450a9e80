"""On a real cluster of this machine: a file is encoded, interrupted and resumed; the service answers from a replica."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

pytest.importorskip("ray")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.usefixtures("minilm")
ROOT = Path(__file__).parents[3]
# Compiled code outlives the test run, as for the other tests of the service: Ray's workers do not compile it each time.
CACHE = ROOT / ".cache" / "serve-tests" / os.environ.get("PYTEST_XDIST_WORKER", "alone")

# In a process of its own: Ray keeps threads and handlers, and warns about much.
SCRIPT = """
import json, sys, urllib.error, urllib.request
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

import anytorch
from anytorch.errors import UsageError
from anytorch.serve.options import ServeOptions
from anytorch.serve.ray.cluster import cluster, share_of
from anytorch.serve.ray.deploy import Scale, deployed, free_port, replicas_running
from anytorch.serve.ray.files import encode_file_on_ray
from anytorch.serve.running import first_answer

folder = Path(sys.argv[1])
answer = {}


class Enough(Exception):
    pass


def stop(done, total):
    answer.setdefault("seen", []).append([done, total])
    if done >= 100:
        raise Enough


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as exc:
        return exc.code, json.loads(exc.read())


with cluster(None) as ray:
    wanted = {"chunk_rows": 50, "missing": "null", "engine": {"device": "cpu"}}
    try:
        encode_file_on_ray(folder / "in.parquet", folder / "out.parquet", progress=stop, **wanted)
    except Enough:
        pass
    report = encode_file_on_ray(folder / "in.parquet", folder / "out.parquet", **wanted)
    answer["report"] = [report.rows, report.resumed, report.missing]
    plain = anytorch.encode_file(folder / "in.parquet", folder / "plain.parquet", chunk_rows=50, missing="null",
                                 engine=anytorch.ArrowEngine(device="cpu", threads=1))
    ours, theirs = pq.read_table(folder / "out.parquet"), pq.read_table(folder / "plain.parquet")
    answer["same"] = ours.equals(theirs) and ours.schema.metadata == theirs.schema.metadata
    answer["left"] = sorted(path.name for path in folder.iterdir())
    options = ServeOptions(port=free_port("127.0.0.1"), forecast=False, device="cpu", max_texts=5)
    with deployed(options, share_of(ray, "cpu", whole_nodes=True), Scale()):
        started = first_answer(options, key=None, stopped=lambda: False)
        answer["problem"] = str(started) if isinstance(started, Exception) else ""
        answer["replicas"] = replicas_running()
        status, found = post(options.url + "/v1/embeddings", {"input": ["one", "two"]})
        answer["vectors"] = [status, [row["embedding"] for row in found["data"]]]
        answer["refused"] = [post(options.url + "/v1/embeddings", {"input": ["x"] * 6})[0],
                             post(options.url + "/v1/embeddings", {"inputs": 1})[0]]
        with urllib.request.urlopen(options.url + "/", timeout=120) as page:
            answer["page"] = page.read()[:15].decode()
    try:
        with deployed(replace(options, port=free_port("127.0.0.1")), share_of(ray, "cpu", whole_nodes=True), Scale()):
            answer["elsewhere"] = "deployed"
    except UsageError as exc:
        answer["elsewhere"] = exc.message
    answer["listens"] = f"{options.host}:{options.port}"
print("ANSWER " + json.dumps(answer))
"""


def environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "ANYTORCH_CACHE_DIR": str(CACHE)}
    return {**os.environ, **own}


def run(tmp_path: Path, *command: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(),
        cwd=tmp_path,
        check=False,
    )


def write_source(path: Path, rows: int) -> None:
    texts = [None if row % 70 == 3 else f"text number {row} about cats, dogs and birds" for row in range(rows)]
    table = pa.table({"id": list(range(rows)), "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=77)


@pytest.mark.long
def test_a_job_and_the_service_on_a_local_cluster(tmp_path: Path) -> None:
    """One cluster for both: starting one is what takes the time."""
    import numpy as np

    from anytorch.text.embed.engine import ArrowEngine

    write_source(tmp_path / "in.parquet", 330)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path, "script.py", str(tmp_path))
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stderr[-3000:]
    answer = json.loads(lines[0][7:])
    rows, resumed, missing = answer["report"]
    assert rows == 330 and missing == 5
    assert 100 <= resumed < 330, "what was finished before the interruption was kept"
    assert answer["same"], "the bits are those of encode_file"
    left = [name for name in answer["left"] if not name.startswith("anytorch-")]
    assert left == ["in.parquet", "out.parquet", "plain.parquet", "script.py"]
    assert answer["problem"] == "" and answer["replicas"] == 1
    status, vectors = answer["vectors"]
    with ArrowEngine(device="cpu") as engine:
        np.testing.assert_allclose(vectors, engine.encode(["one", "two"]), atol=1e-6)
    assert status == 200
    assert answer["refused"] == [413, 422], "limits and checks are the app's own"
    assert f"Ray Serve listens on {answer['listens']} already" in answer["elsewhere"]
    assert answer["page"].lower() == "<!doctype html>"


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on(tmp_path: Path) -> None:
    """kill -9 of the driver of `anytorch embed --ray`, then the same command again."""
    write_source(tmp_path / "in.parquet", 14_000)
    import pyarrow.compute as pc

    table = pq.read_table(tmp_path / "in.parquet")
    pq.write_table(table.filter(pc.is_valid(table["text"])), tmp_path / "in.parquet")
    command = [sys.executable, "-m", "anytorch", "embed", "in.parquet", "--output", "out.parquet", "--ray", "--json"]
    first = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    journal = tmp_path / ".out.parquet.partial" / "journal.json"
    until(lambda: journal.exists() and len(json.loads(journal.read_text())["parts"]) >= 2, "two parts", 600)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = sum(part["rows"] for part in json.loads(journal.read_text())["parts"].values())
    second = run(tmp_path, *command[1:], timeout_s=600)
    assert second.returncode == 0, second.stderr[-3000:]
    told = json.loads(second.stdout)
    assert told["resumed"] >= kept > 0
    assert (
        pq.read_metadata(tmp_path / "out.parquet").num_rows == told["rows"] == table.num_rows - table["text"].null_count
    )
    assert not journal.parent.exists()


@pytest.mark.slow
def test_a_bad_row_is_named_and_not_tried_for_ever(tmp_path: Path) -> None:
    write_source(tmp_path / "in.parquet", 100)
    command = ("-m", "anytorch", "embed", "in.parquet", "--output", "out.parquet", "--ray")
    done = run(tmp_path, *command)
    assert done.returncode == 2
    assert "row 4, column 'text' is missing" in done.stderr
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "anytorch",
        "serve",
        "--ray",
        "--replicas",
        "1:2",
        "--port",
        "0",
        "--no-forecast",
        "--json",
    ]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes) as server:
        try:
            text = ""
            while not text.endswith("}\n"):
                line = server.stdout.readline()
                assert line, "it ended before it was ready"
                text += line
            started = json.loads(text)
            assert started["workers"] == 1 and started["models"]["embeddings"]
            assert ask(started["url"] + "/v1/readyz")["status"] == "ready"
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
        finally:
            if server.poll() is None:
                server.kill()


def ask(url: str) -> Any:
    import urllib.request

    with urllib.request.urlopen(url, timeout=120) as found:
        return json.loads(found.read())
