"""The benchmark in its documented simple form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from anytorch_compat import measuring
from anytorch_compat.measuring import benchmark_backends, headlines
from tests.devices.bench.rows import FAST, ROWS, device, report

from anytorch.devices import bench
from anytorch.devices.bench import BenchmarkReport, workloads
from anytorch.errors import UnknownDevice

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small buffers and one thread: what is measured is checked, not how fast it is."""
    monkeypatch.setattr(workloads, "LEAST_NBYTES", 2**20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_documented_sample(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # seeds/2-yirage.md, as written; only the ten seconds are cut short underneath.
    def shortened(name: str, *, duration_s: float) -> BenchmarkReport:
        assert duration_s == 10
        return bench.benchmark(name, duration_s=0.1)

    monkeypatch.setattr(measuring, "benchmark", shortened)
    import yirage as yr

    results = yr.benchmark_backends(duration_seconds=10)
    print("Performance results:", results)
    assert results["cpu"]["available"] is True
    for number in ("matmul_tflops", "bandwidth_gb_per_s", "launch_us", "transformer_tokens_per_s"):
        assert results["cpu"][number] > 0
    for name, numbers in results.items():
        assert numbers["available"] or numbers["reason"], name
    assert "matmul_tflops" in capsys.readouterr().out


def test_back_ends_by_name() -> None:
    missing = [name for name in ("npu", "xpu") if not _usable(name)]
    results = benchmark_backends(duration_seconds=0.05, backends=missing)
    assert list(results) == missing
    assert all(not numbers["available"] and numbers["reason"] for numbers in results.values())
    with pytest.raises(UnknownDevice, match="did you mean 'cuda'"):
        benchmark_backends(backends=["cudda"])


def _usable(backend: str) -> bool:
    from anytorch.devices.bench.suite import usable_devices

    return any(device.backend == backend for device in usable_devices(None))


def test_an_interrupt_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    partial = replace(report(device("cpu", ROWS)), partial=True)
    monkeypatch.setattr(measuring, "benchmark", lambda *_, **__: partial)
    results = benchmark_backends(duration_seconds=1, backends=["cpu", "npu"])
    assert list(results) == ["cpu"] and results["cpu"]["partial"] is True


def test_headlines_are_flat_numbers() -> None:
    numbers = headlines(device("cuda:0", FAST))
    assert numbers["matmul_tflops"] == 50.0 and numbers["matmul_tflops_bfloat16"] == 700.0
    assert numbers["host_to_device_gb_per_s"] == 50.0 and "device_to_host_gb_per_s" not in numbers
    assert numbers["transformer_tokens_per_s"] == 8 * 128 / 0.0002
    assert numbers["problems"] == ["matmul, float64: off by 2"]
    assert headlines(device("cpu", ROWS))["round_trip_us"] == 1.2
