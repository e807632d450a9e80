"""Measuring devices: matrix products, memory, launches, copies and a transformer block, answers checked first.

The way data flows: `workloads` say what is run, `timing` how it is timed, `suite` runs all of it on every device,
`results` are the values that come out, `picture` draws them. Importing this package imports neither torch nor
matplotlib.
"""

from __future__ import annotations

from anytorch.devices.bench.picture import plot as plot
from anytorch.devices.bench.results import BenchmarkReport as BenchmarkReport
from anytorch.devices.bench.results import DeviceResult as DeviceResult
from anytorch.devices.bench.results import Row as Row
from anytorch.devices.bench.results import Timing as Timing
from anytorch.devices.bench.results import from_json as from_json
from anytorch.devices.bench.results import load as load
from anytorch.devices.bench.results import relative_to_cpu as relative_to_cpu
from anytorch.devices.bench.results import save as save
from anytorch.devices.bench.suite import Progress as Progress
from anytorch.devices.bench.suite import benchmark as benchmark
from anytorch.devices.bench.workloads import WORKLOADS as WORKLOADS
