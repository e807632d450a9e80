"""POST /v1/benchmark: streamed, one at a time, ended with its reader, and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from anytorch.serve import benchmarks

pytest.importorskip("torch")
QUICK = {"devices": ["cpu"], "seconds": 0.3, "workloads": ["launch"]}


@pytest.fixture
def runs(built_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(benchmarks, "folder", lambda: tmp_path / "benchmarks")
    return tmp_path / "benchmarks"


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_a_benchmark_streams_and_is_kept(service: Any, runs: Path) -> None:
    with service.client.stream("POST", "/v1/benchmark", json=QUICK, timeout=120) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        found = list(events(answer.iter_lines()))
    names = [name for name, _ in found]
    assert names[0] == "progress" and names[-1] == "done" and "result" in names, found[-1]
    result = next(data for name, data in found if name == "result")
    assert result["device"] == "cpu" and result["rate"] > 0 and result["unit"] and "launch" in result["test"]
    assert {data["fraction"] for name, data in found if name == "progress"} >= {0.0, 1.0}
    (kept,) = service.client.get("/v1/benchmark/runs").json()["runs"]
    assert kept["run_id"] == found[-1][1]["run_id"] and kept["rows"] == found[-1][1]["rows"] and not kept["partial"]


def test_only_one_at_a_time_and_closing_ends_it(service: Any, runs: Path) -> None:
    body = {**QUICK, "seconds": 60.0, "workloads": None}
    with service.client.stream("POST", "/v1/benchmark", json=body, timeout=120) as answer:
        told = events(answer.iter_lines())  # kept: the stream ends with its iterator
        for name, data in told:
            if name == "progress" and data["message"] != "starting":
                break
        second = service.client.post("/v1/benchmark", json=QUICK)
        assert second.status_code == 409 and second.json()["type"].endswith("benchmark-under-way")
    until(
        lambda: not service.app.guard.under_way and service.state.benchmarks._live is None,
        "it to end without its reader",
        50,  # sooner than it would end by itself
    )


def test_a_reader_that_comes_back_finds_all_of_it(service: Any, runs: Path) -> None:
    """What a page does that is loaded again."""
    assert service.client.get("/v1/benchmark/running").json() == {"seconds": None, "devices": None}
    assert service.client.get("/v1/benchmark/running/events").status_code == 404
    body = {**QUICK, "seconds": 30.0, "workloads": None, "keep_s": 60.0}
    with service.client.stream("POST", "/v1/benchmark", json=body, timeout=120) as answer:
        told = events(answer.iter_lines())
        first = next(told)
        for name, _ in told:
            if name == "result":
                break
    assert service.client.get("/v1/benchmark/running").json() == {"seconds": 30.0, "devices": ["cpu"]}
    with service.client.stream("GET", "/v1/benchmark/running/events", timeout=120) as answer:
        again = events(answer.iter_lines())
        assert next(again) == first
        for name, _ in again:
            if name == "result":
                break
        assert service.client.delete("/v1/benchmark/running").status_code == 204
        assert "done" not in [name for name, _ in again], "it was ended"
    assert service.client.get("/v1/benchmark/running").json()["seconds"] is None
    (kept,) = service.client.get("/v1/benchmark/runs").json()["runs"]
    assert kept["partial"] and kept["rows"]
    assert service.client.delete("/v1/benchmark/running").status_code == 204, "nothing runs: nothing to end"


def test_nobody_comes_back(service: Any, runs: Path) -> None:
    body = {**QUICK, "seconds": 60.0, "workloads": None, "keep_s": 0.2}
    with service.client.stream("POST", "/v1/benchmark", json=body, timeout=120) as answer:
        next(events(answer.iter_lines()))
    until(lambda: service.state.benchmarks._live is None, "it to end without a reader", 50)


@pytest.mark.parametrize(
    "body",
    [{"seconds": 0}, {"seconds": 1e9}, {"devices": []}, {"devices": ["abacus"]}, {"devices": ["xpu:0"]},
     {"workloads": ["chess"]}, {"devices": "cpu"}],
)  # fmt: skip
def test_what_makes_no_sense_is_told_before_it_streams(service: Any, body: dict[str, Any]) -> None:
    answer = service.client.post("/v1/benchmark", json=body)
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"


def test_a_process_that_dies_is_told(service: Any, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks.sys, "executable", "/bin/false")
    answer = service.client.post("/v1/benchmark", json=QUICK)
    assert [name for name, _ in events(iter(answer.text.splitlines()))] == ["progress", "failed"]


def test_a_reservation_that_nobody_takes_up_lapses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(benchmarks.time, "monotonic", lambda: now[0])
    one = benchmarks.BenchmarkRunner()
    one.reserve()
    with pytest.raises(benchmarks.Problem):
        one.reserve()
    now[0] = 11.0
    one.reserve()


def test_damaged_runs_are_left_out(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = benchmarks.keep([], [], 1.0, None, partial=True)
    again = benchmarks.keep([], [], 1.0, None, partial=False)
    assert kept.run_id != again.run_id
    (runs / "20200101-000000.json").write_text("{")
    (runs / "notes.json").write_text("{}")
    assert {run.run_id for run in benchmarks.earlier()} == {kept.run_id, again.run_id}
    assert "20200101" in caplog.text
