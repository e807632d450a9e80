"""From times to rates, and each rate beside its limit. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from anytorch.devices.bench.results import Row, Timing
from anytorch.devices.bench.workloads import Prepared
from anytorch.devices.types import Caps


def disturbed_share(rows: Sequence[Row]) -> float:
    """The share of rows with mostly interrupted samples: near 1, the machine was too busy with other work to tell."""
    timings = [row.timing for row in rows if row.timing is not None]
    busy = [t for t in timings if t.disturbed >= t.repeats]
    return len(busy) / len(timings) if timings else 0.0


def rate(timing: Timing, prepared: Prepared, unit: str) -> float:
    if unit == "µs":
        return timing.median_s * 1e6
    amount = prepared.flop / 1e12 if unit == "TFLOP/s" else prepared.nbytes / 1e9
    return amount / timing.median_s


def with_limits(rows: Sequence[Row], caps: Caps) -> tuple[Row, ...]:
    """Each row beside its limit: what the device states, else the best of the same kind measured on it. Pure."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.ok and row.rate is not None and row.rate > (best[kind(row)].rate or 0.0 if kind(row) in best else 0.0):
            best[kind(row)] = row
    result = []
    for row in rows:
        if not row.ok or row.rate is None or row.unit == "µs":
            result.append(row)
            continue
        stated = stated_limit(row, caps)
        if stated is not None:
            limit, source = stated, "stated by the device"
        else:
            peer = best[kind(row)]
            limit, source = peer.rate or math.inf, f"best measured here ({peer.workload}, {peer.case})"
        result.append(replace(row, limit=limit, share=row.rate / limit, limit_source=source))
    return tuple(result)


def kind(row: Row) -> tuple[str, str]:
    """Rows that share a limit: all computing in one dtype, all memory traffic, all copies."""
    return ("compute", row.dtype) if row.unit == "TFLOP/s" else (row.workload, "")


def stated_limit(row: Row, caps: Caps) -> float | None:
    if row.workload == "bandwidth":
        return caps.peak_gb_per_s
    if row.unit != "TFLOP/s":
        return None
    reduced = row.dtype == "float32" and row.parameters.get("matmul_precision", "highest") != "highest"
    return caps.peak_tflops.get("tf32" if reduced and "tf32" in caps.peak_tflops else row.dtype)
