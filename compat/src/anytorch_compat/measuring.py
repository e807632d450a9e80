"""The benchmark in its documented simple form: a few numbers for every back end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.devices.bench.results import DeviceResult, Row
from anytorch.devices.bench.suite import benchmark
from anytorch.devices.choose import survey
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate, Level, State


def benchmark_backends(
    duration_seconds: float = 10, backends: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Headline numbers by back end: `{"cpu": {"available": True, "matmul_tflops": …, "bandwidth_gb_per_s": …, …}, …}`.

    The best device of every usable back end is measured for `duration_seconds`; the others say why they are not.

    >>> results = benchmark_backends(duration_seconds=0.2, backends=["cpu"])
    >>> results["cpu"]["available"]
    True
    """
    known = registry()
    names = list(known.backends) if backends is None else [known.get(str(name)).name for name in backends]
    found = survey("needed")
    results: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        device = best_of(name, found.devices, by_name=backends is not None)
        if device is None:
            blocking = [r.text for r in found.reasons if name in r.backends and r.level is Level.ERROR]
            reason = blocking[0] if blocking else f"no usable {known.get(name).title} was found on this machine"
            results[name] = {"available": False, "reason": reason}
        else:
            report = benchmark(device.id, duration_s=duration_seconds)
            results[name] = {"available": True, **headlines(report.devices[0])}
            if report.partial:  # Ctrl-C: what was measured so far is the answer
                results[name]["partial"] = True
                break
    return results


def best_of(backend: str, devices: Sequence[Candidate], *, by_name: bool) -> Candidate | None:
    """Candidates come best first. A software adapter is measured only if its back end was asked for by name."""
    usable = [c for c in devices if c.backend == backend and c.state is State.USABLE]
    return next((c for c in usable if by_name or not c.software), None)


def headlines(device: DeviceResult) -> dict[str, Any]:
    """A device's rows as a few flat numbers; what was not measured is left out."""
    numbers: dict[str, Any] = {"device": device.id, "name": device.name}
    for row in device.find("matmul"):
        name = "matmul_tflops" if row.dtype == "float32" else f"matmul_tflops_{row.dtype}"
        numbers[name] = _round(row.rate)
    if rates := [row.rate for row in device.find("bandwidth") if row.rate]:
        numbers["bandwidth_gb_per_s"] = _round(max(rates))
    for row in device.find("launch"):
        numbers["launch_us" if row.parameters["kind"] == "queued" else "round_trip_us"] = _round(row.rate)
    for name, to_device in (("host_to_device_gb_per_s", True), ("device_to_host_gb_per_s", False)):
        if rates := [row.rate for row in device.find("copies", to_device=to_device) if row.rate]:
            numbers[name] = _round(max(rates))
    blocks = device.find("transformer")
    if blocks:
        fastest = max(blocks, key=tokens_per_s)
        numbers["transformer_tokens_per_s"] = _round(tokens_per_s(fastest))
        numbers["transformer_case"] = fastest.case
    troubled = [
        f"{row.workload}, {row.case}: {row.reason}" for row in device.rows if row.status not in ("ok", "skipped")
    ]
    if troubled:
        numbers["problems"] = troubled
    return numbers


def tokens_per_s(row: Row) -> float:
    assert row.timing is not None
    return float(row.parameters["batch"] * row.parameters["seq"] / row.timing.median_s)


def _round(value: float | None) -> float | None:
    """Four digits: more would be noise."""
    return None if value is None else float(f"{value:.4g}")
