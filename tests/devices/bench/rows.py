"""Made-up measurements of a CPU and of a card, for what is computed from them."""

from __future__ import annotations

from typing import Any

from anytorch.devices.bench import BenchmarkReport, DeviceResult, Row, Timing


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
