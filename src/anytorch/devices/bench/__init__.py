"""Measuring devices: matrix products, memory, launches, copies and a transformer block, answers checked first.

The way data flows: `workloads` say what is run, `timing` how it is timed, `suite` runs all of it on every device,
`results` are the values that come out, `picture` draws them. Importing this package imports neither torch nor
matplotlib.
"""

from __future__ import annotations

from anytorch.devices.bench.picture import plot
from anytorch.devices.bench.results import (
    BenchmarkReport,
    DeviceResult,
    Row,
    Timing,
    from_json,
    load,
    relative_to_cpu,
    save,
)
from anytorch.devices.bench.suite import Progress, benchmark
from anytorch.devices.bench.workloads import WORKLOADS

__all__ = [
    "WORKLOADS",
    "BenchmarkReport",
    "DeviceResult",
    "Progress",
    "Row",
    "Timing",
    "benchmark",
    "from_json",
    "load",
    "plot",
    "relative_to_cpu",
    "save",
]
