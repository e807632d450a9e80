"""The documented simple form, the comparison with the CPU, and bench/backends.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import anytorch
from anytorch.devices import bench
from anytorch.devices.bench import BenchmarkReport, DeviceResult, Row, Timing, simple
from anytorch.devices.bench.simple import headlines, relative_to_cpu
from anytorch.errors import UnknownDevice

pytest.importorskip("torch")


def test_the_documented_sample(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # seeds/2-yirage.md, as written; only the ten seconds are cut short underneath.
    def shortened(name: str, *, duration_s: float) -> BenchmarkReport:
        assert duration_s == 10
        return bench.benchmark(name, duration_s=0.1)

    monkeypatch.setattr(simple, "benchmark", shortened)
    yr = anytorch
    results = yr.benchmark_backends(duration_seconds=10)
    print("Performance results:", results)
    assert results["cpu"]["available"] is True
    for number in ("matmul_tflops", "bandwidth_gb_per_s", "launch_us", "transformer_tokens_per_s"):
        assert results["cpu"][number] > 0
    for name, numbers in results.items():
        assert numbers["available"] or numbers["reason"], name
    assert "matmul_tflops" in capsys.readouterr().out


def test_importing_measures_and_loads_nothing(run_python: Callable[..., Any]) -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'tomli_w'}"
    code = f"import anytorch.devices.bench, anytorch.devices.tune, sys; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"


def test_back_ends_by_name() -> None:
    missing = [name for name in ("npu", "xpu") if not _usable(name)]
    results = bench.benchmark_backends(duration_seconds=0.05, backends=missing)
    assert list(results) == missing
    assert all(not numbers["available"] and numbers["reason"] for numbers in results.values())
    with pytest.raises(UnknownDevice, match="did you mean 'cuda'"):
        bench.benchmark_backends(backends=["cudda"])


def _usable(backend: str) -> bool:
    from anytorch.devices.bench.suite import usable_devices

    return any(device.backend == backend for device in usable_devices(None))


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = replace(report(device("cpu", ROWS)), partial=True)
    monkeypatch.setattr(simple, "benchmark", lambda *_, **__: partial)
    results = bench.benchmark_backends(duration_seconds=1, backends=["cpu", "npu"])
    assert list(results) == ["cpu"] and results["cpu"]["partial"] is True


def row(
    workload: str, rate: float, unit: str, dtype: str = "float32", median_s: float = 0.01, **parameters: Any
) -> Row:
    timing = Timing(median_s, 0.0, median_s, median_s, 3)
    return Row(workload, dtype, dtype, "ok", parameters=parameters, timing=timing, rate=rate, unit=unit)


def device(name: str, rows: tuple[Row, ...]) -> DeviceResult:
    return DeviceResult(name, name.split(":")[0], name, name, None, rows, 1.0, {"threads": 2, "disturbed": 0.0})


def report(*devices: DeviceResult) -> BenchmarkReport:
    machine = {"cpu": "x", "cores": {"usable": 2}}
    return BenchmarkReport(devices, machine, "2.13.0", {}, "2026-11-15T00:00:00+00:00", "0.1.0", None, 1.0)


ROWS = (
    row("matmul", 0.2, "TFLOP/s"),
    row("bandwidth", 50.0, "GB/s", kind="copy"),
    row("launch", 1.0, "µs", kind="queued"),
    row("launch", 1.2, "µs", kind="and wait"),
    row("transformer", 0.1, "TFLOP/s", median_s=0.010, batch=8, seq=128, hidden=256),
)
FAST = (
    row("matmul", 50.0, "TFLOP/s"),
    row("matmul", 700.0, "TFLOP/s", "bfloat16"),
    row("bandwidth", 4000.0, "GB/s", kind="copy"),
    row("copies", 20.0, "GB/s", to_device=True, pinned=False),
    row("copies", 50.0, "GB/s", to_device=True, pinned=True),
    row("transformer", 9.0, "TFLOP/s", "bfloat16", median_s=0.0002, batch=8, seq=128, hidden=256),
    row("transformer", 9.0, "TFLOP/s", "bfloat16", median_s=0.0001, batch=1, seq=128, hidden=256),
    Row("matmul", "float64", "float64", "wrong", "off by 2"),
)


def test_headlines_are_flat_numbers() -> None:
    numbers = headlines(device("cuda:0", FAST))
    assert numbers["matmul_tflops"] == 50.0 and numbers["matmul_tflops_bfloat16"] == 700.0
    assert numbers["host_to_device_gb_per_s"] == 50.0 and "device_to_host_gb_per_s" not in numbers
    assert numbers["transformer_tokens_per_s"] == 8 * 128 / 0.0002
    assert numbers["problems"] == ["matmul, float64: off by 2"]
    assert headlines(device("cpu", ROWS))["round_trip_us"] == 1.2


def test_ratios_to_the_cpu() -> None:
    ratios = relative_to_cpu(report(device("cpu", ROWS), device("cuda:0", FAST)))["cuda:0"]
    assert ratios["matmul float32"] == pytest.approx(250)
    assert ratios["matmul bfloat16"] == pytest.approx(3500)
    assert ratios["bandwidth copy"] == pytest.approx(80)
    assert ratios["transformer bfloat16"] == pytest.approx(50)
    assert relative_to_cpu(report(device("cuda:0", FAST))) == {}


def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "bench" / "backends.py"
    spec = importlib.util.spec_from_file_location("bench_backends", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_prints_ratios_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main(["--duration", "0.05", "--devices", "cpu", "--output", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "matmul" in out and "only the CPU" in out
    assert bench.load(tmp_path / "r.json").devices[0].id == "cpu"
    text = script().text(report(device("cpu", ROWS), device("cuda:0", FAST)))
    assert "claimed: 10 to 50 times" in text and "250.0 ×" in text


def test_the_script_says_what_is_wrong_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main(["--devices", "qpu"]) == 2
    assert "unknown device 'qpu'" in capsys.readouterr().err
