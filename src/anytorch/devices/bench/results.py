"""What a benchmark found, as frozen values that turn into JSON and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from anytorch.devices.types import Caps
from anytorch.errors import UsageError
from anytorch.files import replace_file
from anytorch.probe.facts import as_json
from anytorch.values import checked

FORMAT = 1
STATUSES = ("ok", "wrong", "out-of-memory", "skipped", "failed")


@dataclass(frozen=True)
class Timing:
    """Seconds of one run. The median and the interquartile spread are not moved by a few disturbed repeats."""

    median_s: float
    spread_s: float  # third quartile minus first
    best_s: float
    cpu_s: float  # processor time this process spent per run, on all its threads
    repeats: int  # samples taken
    inner: int = 1  # runs per sample
    disturbed: int = 0  # samples in which the system took the processor away; left out where enough others are there


@dataclass(frozen=True)
class Row:
    """One workload in one size and dtype. Only a row whose answer was right has a timing."""

    workload: str  # "matmul"
    case: str  # "float32 1024×1024"
    dtype: str
    status: str  # one of STATUSES
    reason: str = ""  # why it was not timed
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timing: Timing | None = None
    rate: float | None = None
    unit: str = ""  # "TFLOP/s", "GB/s", "µs"
    error: float | None = None  # largest difference from the fp64 reference, relative to its largest value
    tolerance: float | None = None
    limit: float | None = None  # in `unit`
    share: float | None = None  # rate / limit
    limit_source: str = ""  # "stated by the device" or "best measured here (…)"

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class DeviceResult:
    id: str  # "rocm:0"
    backend: str
    torch_name: str  # "cuda:0"
    name: str
    uuid: str | None
    rows: tuple[Row, ...]
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)  # threads, matmul precision, memory, unified

    def find(self, workload: str, **wanted: Any) -> list[Row]:
        """The good rows of a workload whose dtype or parameters are as `wanted`."""
        return [
            row
            for row in self.rows
            if row.ok
            and row.workload == workload
            and all(
                (row.dtype if key == "dtype" else row.parameters.get(key)) == value for key, value in wanted.items()
            )
        ]


@dataclass(frozen=True)
class BenchmarkReport:
    devices: tuple[DeviceResult, ...]
    machine: Mapping[str, Any]
    torch: str
    driver: Mapping[str, str]
    date: str  # ISO 8601, UTC
    anytorch: str
    commit: str | None
    duration_s: float  # per device, as asked for
    partial: bool = False  # interrupted: rows are missing
    format: int = FORMAT


def from_json(data: Any) -> BenchmarkReport:
    """The report that `as_json` made `data` of. Raises UsageError if `data` is not a report."""
    try:
        if data["format"] != FORMAT:
            raise UsageError(f"a benchmark report of format {data['format']!r}; this anytorch reads {FORMAT}")
        devices = tuple(
            checked(DeviceResult(**{**device, "rows": tuple(_row(row) for row in device["rows"])}))
            for device in data["devices"]
        )
        return checked(BenchmarkReport(**{**data, "devices": devices}))
    except (KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"this is not a benchmark report: {exc}", hint="make one with `anytorch benchmark --output results.json`"
        ) from exc


def _row(data: Mapping[str, Any]) -> Row:
    timing = data.get("timing")
    row = checked(Row(**{**data, "timing": None if timing is None else checked(Timing(**timing))}))
    if row.ok and row.timing is not None and not row.timing.median_s > 0:
        raise TypeError(f"the row {row.case} has an invalid time: its median is not above 0 s")
    return row


def save(report: BenchmarkReport, path: str | Path) -> Path:
    """Write the report as JSON, whole or not at all. Raises UsageError where the file cannot be written."""
    path = Path(path)
    body = json.dumps(as_json(report), indent=1, allow_nan=False, ensure_ascii=False)
    try:
        replace_file(path, (body + "\n").encode())
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}", hint="name another file") from exc
    return path


def load(path: str | Path) -> BenchmarkReport:
    """Read a report that `save` wrote. Raises UsageError."""
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is not JSON: {exc}") from exc
    return from_json(data)


def relative_to_cpu(report: BenchmarkReport) -> dict[str, dict[str, float]]:
    """How many times faster than the CPU each other device is, by workload and dtype. Pure.

    The CPU counts in float32, its safe choice: a device's "matmul bfloat16" is compared with the CPU's float32.
    """
    cpu = next((device for device in report.devices if device.torch_name == "cpu"), None)
    if cpu is None:
        return {}
    result: dict[str, dict[str, float]] = {}
    for device in report.devices:
        if device is cpu:
            continue
        ratios: dict[str, float] = {}
        for base in cpu.find("matmul", dtype="float32"):
            for row in device.find("matmul"):
                ratios[f"matmul {row.dtype}"] = (row.rate or 0.0) / (base.rate or 1.0)
        for base in cpu.find("bandwidth"):
            for row in device.find("bandwidth", kind=base.parameters.get("kind")):
                ratios[f"bandwidth {base.parameters.get('kind')}"] = (row.rate or 0.0) / (base.rate or 1.0)
        for base in cpu.find("transformer", dtype="float32"):
            same = {key: base.parameters.get(key) for key in ("batch", "seq", "hidden")}
            for row in device.find("transformer", **same):
                if base.timing is None or row.timing is None:
                    continue  # in a report from elsewhere
                ratios[f"transformer {row.case}"] = base.timing.median_s / row.timing.median_s
        result[device.id] = ratios
    return result


def disturbed_share(rows: Sequence[Row]) -> float:
    """The share of rows with mostly interrupted samples: near 1, the machine was too busy with other work to tell."""
    timings = [row.timing for row in rows if row.timing is not None]
    busy = [t for t in timings if t.disturbed >= t.repeats]
    return len(busy) / len(timings) if timings else 0.0


BUSY_ROWS, BUSY_CORES = 0.25, 0.5


def busy_words(facts: Mapping[str, Any]) -> str:
    """What to say of a device's rates where the machine did other work meanwhile; "" where it did not. Pure.

    `facts`: of a DeviceResult. The rates are then what this machine gave beside that work, not what the device can do.
    """
    other, disturbed = facts.get("other_cores"), facts.get("disturbed") or 0.0
    if not ((other or 0.0) >= BUSY_CORES or disturbed >= BUSY_ROWS):
        return ""
    how = f"{other:.1f} of its cores" if (other or 0.0) >= BUSY_CORES else f"{disturbed:.0%} of the rows were disturbed"
    return f"the machine was busy with other work while measuring ({how}): rates are too low; repeat when it is idle"


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
        elif (peer := best[kind(row)]) is row:
            # Its share of itself would read as "100 % of the limit", of a limit that nobody knows.
            result.append(replace(row, limit_source="no limit is stated; the best of its kind measured here"))
            continue
        else:
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
