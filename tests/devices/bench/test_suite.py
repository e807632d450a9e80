"""The whole benchmark, tiny, and what becomes of it when something goes wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.devices.bench.rows import FAST, ROWS, device
from tests.devices.bench.rows import report as report_of

from anytorch.devices import bench
from anytorch.devices.bench import suite, workloads
from anytorch.devices.bench.results import STATUSES, Row, Timing, with_limits
from anytorch.devices.bench.suite import usable_devices
from anytorch.devices.types import Caps
from anytorch.errors import DeviceFallbackWarning, UnknownDevice, UsageError
from anytorch.probe.facts import as_json

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no case is left out for want of time."""
    monkeypatch.setattr(suite, "GRACE_S", 1000.0)


def tiny(**changes: Any) -> bench.BenchmarkReport:
    options: dict[str, Any] = {"devices": "cpu", "duration_s": 0.05, "hidden_sizes": (64,), "seq_lengths": (8,)}
    return bench.benchmark(**{**options, **changes})


def test_a_report_has_every_workload_and_where_it_comes_from() -> None:
    seen: list[tuple[int, int, str]] = []
    report = tiny(dtypes=["float32"], progress=lambda *step: seen.append(step))
    (device,) = report.devices
    assert {row.workload for row in device.rows} == set(bench.WORKLOADS)
    for row in device.rows:
        assert row.status in STATUSES
        if row.workload == "copies":
            assert row.status == "skipped" and "shares" in row.reason
        else:
            assert row.ok, row.reason
            assert row.timing is not None and row.timing.median_s > 0 and row.rate is not None and row.rate > 0
            assert row.error is not None and row.tolerance is not None and row.error <= row.tolerance
            if row.unit == "µs":
                assert row.limit is None
            else:
                assert row.limit_source and (row.share is None or 0 < row.share < 1)
    assert report.torch == torch.__version__ and report.machine["cores"]["usable"] >= 1
    assert not report.partial and report.date.endswith("+00:00")
    assert [step[0] for step in seen] == list(range(len(device.rows) + 1))
    assert {step[1] for step in seen} == {len(device.rows)}


def test_the_report_survives_json(tmp_path: Path) -> None:
    report = tiny(workloads=["matmul", "launch"], dtypes=["float32", "float16"])
    path = bench.save(report, tmp_path / "new folder" / "results.json")
    again = bench.load(path)
    assert again == bench.from_json(json.loads(json.dumps(as_json(report))))
    assert as_json(again) == as_json(report)
    assert again.devices[0].rows[0].timing == report.devices[0].rows[0].timing


@pytest.mark.parametrize("content", ["", "[1", "[]", "{}", '{"format": 99}', '{"format": 1, "devices": [{}]}'])
def test_a_file_that_is_no_report_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UsageError):
        bench.load(path)
    assert path.read_text() == content


def test_a_report_of_other_kinds_is_refused_before_it_is_compared(tmp_path: Path) -> None:
    body = json.loads(json.dumps(as_json(report_of(device("cpu", ROWS), device("cuda:0", FAST)))))
    wrong: list[tuple[tuple[Any, ...], Any]] = [
        (("devices", 0, "rows"), [3]),
        (("devices", 0, "rows", 0, "rate"), "fast"),
        (("devices", 0, "rows", 0, "rate"), 10**400),
        (("devices", 0, "rows", 0, "parameters"), []),
        (("devices", 0, "rows", 0, "timing", "disturbed"), None),
        (("devices", 0, "rows", 0, "timing", "median_s"), 0),
        (("date",), 5),
    ]
    for (*way, last), value in wrong:
        changed: Any = json.loads(json.dumps(body))
        place = changed
        for step in way:
            place = place[step]
        place[last] = value
        with pytest.raises(UsageError, match="not a benchmark report"):
            bench.from_json(changed)
    for row in body["devices"][0]["rows"]:
        row["parameters"], row["timing"] = {}, None
    assert "bandwidth copy" not in bench.relative_to_cpu(bench.from_json(body))["cuda:0"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError, match="cannot write"):
            bench.save(tiny(workloads=["launch"]), tmp_path / "x.json")
    finally:
        tmp_path.chmod(0o700)


def test_a_path_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        bench.save(tiny(workloads=["launch"]), tmp_path / "file" / "x.json")


def test_a_wrong_answer_is_marked_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = workloads.matmul_reference
    monkeypatch.setattr(workloads, "matmul_reference", lambda n, kind: right(n, kind) + 1)
    rows = tiny(workloads=["matmul", "launch"], dtypes=["float32"]).devices[0].rows
    assert rows[0].status == "wrong" and rows[0].timing is None and rows[0].rate is None
    assert "off by" in rows[0].reason
    assert all(row.ok for row in rows[1:])


def test_out_of_memory_is_a_row_and_the_rest_goes_on() -> None:
    # A real one: 2**45 × 8 × 64 float32 numbers are more than any address space holds.
    rows = (
        tiny(workloads=["transformer", "launch"], dtypes=["float32"], batch_sizes=(2**45, 1), iterations=1)
        .devices[0]
        .rows
    )
    by_batch = {row.parameters.get("batch"): row for row in rows if row.workload == "transformer"}
    assert by_batch[1].ok
    assert by_batch[2**45].status == "out-of-memory" and "allocate" in by_batch[2**45].reason


def test_any_other_error_is_a_row_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    # Verbatim from torch 2.13.0+cpu: torch.zeros(1).to("vulkan") (shared/research/devices.md, 0.4).
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("PyTorch is not linked with support for vulkan devices")

    monkeypatch.setattr(workloads, "block", refuse)
    rows = tiny(workloads=["transformer", "launch"], dtypes=["float32"]).devices[0].rows
    assert [row.status for row in rows if row.workload == "transformer"] == ["failed", "failed"]
    assert "not linked with support" in rows[-1].reason
    assert [row.status for row in rows if row.workload == "launch"] == ["ok", "ok"]


def test_an_interrupt_returns_what_there_is_marked_partial(tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    report = tiny(dtypes=["float32"], progress=stop)
    assert report.partial and len(report.devices[0].rows) == 2
    assert bench.load(bench.save(report, tmp_path / "partial.json")).partial


def test_what_would_take_too_long_is_skipped_with_the_time_it_needs() -> None:
    report = tiny(workloads=["matmul", "transformer"], dtypes=["float32"], batch_sizes=(1, 2**45))
    rows = {row.parameters.get("batch"): row for row in report.devices[0].rows}
    assert rows[2**45].status == "skipped" and "no time left" in rows[2**45].reason


def test_with_no_time_at_all_every_workload_still_has_its_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "GRACE_S", -1000.0)
    rows = tiny(workloads=["matmul", "launch", "transformer"]).devices[0].rows
    assert [row.workload for row in rows if row.ok] == ["matmul", "launch", "transformer"]
    assert all(row.status == "skipped" and "no time left" in row.reason for row in rows if not row.ok)


def test_iterations_are_obeyed() -> None:
    rows = tiny(workloads=["launch"], iterations=5).devices[0].rows
    assert all(row.timing is not None and row.timing.repeats + row.timing.disturbed >= 5 for row in rows)


@pytest.mark.parametrize(
    "bad", [{"duration_s": 0}, {"duration_s": -1}, {"iterations": 0}, {"dtypes": ["int3"]}, {"workloads": ["sorting"]}]
)
def test_bad_requests_are_refused_before_anything_runs(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bench.benchmark("cpu", **bad)


def test_devices_by_name() -> None:
    assert [d.id for d in usable_devices(["cpu", "CPU", "host"])] == ["cpu"]
    assert not any(d.software for d in usable_devices(None))
    with pytest.raises(UnknownDevice):
        usable_devices("cqu")
    with pytest.raises(UsageError, match="no device"):
        usable_devices([])


def test_a_missing_device_falls_back_and_says_so() -> None:
    if any(d.backend == "npu" for d in usable_devices(None)):
        pytest.skip("this machine has an NPU")
    with pytest.warns(DeviceFallbackWarning, match="npu"):
        assert usable_devices("npu")[0].id == "cpu"


def row(workload: str, case: str, rate: float, unit: str, dtype: str = "float32", **parameters: Any) -> Row:
    return Row(workload, case, dtype, "ok", parameters=parameters, timing=Timing(1, 0, 1, 1, 3), rate=rate, unit=unit)


def test_limits_are_the_stated_ones_or_the_best_of_the_kind() -> None:
    # H200: 4.8 TB/s and 66.9 TFLOP/s of plain fp32 by NVIDIA's data sheet.
    caps = Caps(("float32",), ("float32",), None, peak_gb_per_s=4800.0, peak_tflops={"float32": 66.9, "tf32": 494.7})
    rows = [
        row("matmul", "a", 50.0, "TFLOP/s"),
        row("matmul", "b", 300.0, "TFLOP/s", matmul_precision="high"),
        row("matmul", "c", 700.0, "TFLOP/s", "bfloat16"),
        row("transformer", "d", 350.0, "TFLOP/s", "bfloat16"),
        row("bandwidth", "e", 4000.0, "GB/s"),
        row("copies", "f", 20.0, "GB/s"),
        row("copies", "g", 50.0, "GB/s"),
        row("launch", "h", 5.0, "µs"),
        Row("matmul", "i", "float64", "failed", unit="TFLOP/s"),
    ]
    limited = {r.case: r for r in with_limits(rows, caps)}
    assert limited["a"].limit == 66.9 and limited["a"].limit_source == "stated by the device"
    assert limited["b"].limit == 494.7
    assert limited["c"].share is None and limited["c"].limit is None  # the best of its kind is no limit of itself
    assert limited["d"].share == 0.5 and limited["d"].limit_source == "best measured here (matmul, c)"
    assert limited["e"].share == pytest.approx(4000 / 4800)
    assert limited["f"].share == 0.4 and limited["g"].share is None
    assert limited["h"].limit is None and limited["i"].share is None
