"""Where a result comes from: date, commit, and the machine with the CPU's features, for every file in bench/results/.

A ratio depends on them: integer kernels gain far more on a CPU with VNNI than on one without.
"""

from __future__ import annotations

import os
import platform
from typing import Any

# What makes one CPU run other code than the next: each of them changes what NumPy, torch, a driver or we compute with.
SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "LP_NATIVE_VECTOR_WIDTH",
    "MKL_CBWR",
    "MKL_NUM_THREADS",
    "NPY_DISABLE_CPU_FEATURES",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
)


def machine() -> dict[str, Any]:
    """The CPU, its features, the SIMD level of our C++, usable cores, GPUs, drivers, load, and the switches that are set."""
    # Not at the top: some benches put src/ on the path first.
    from anytorch import native
    from anytorch.devices.bench.suite import machine_facts
    from anytorch.measured.machine import drivers
    from anytorch.probe import snapshot

    hardware = snapshot()
    facts = machine_facts(hardware)
    return {
        "cpu": facts["cpu"] or platform.processor(),
        "features": facts["features"],
        "simd": native.level().name,
        "cores": hardware.cpu.usable,
        "memory_nbytes": facts["memory_nbytes"],
        "gpus": [gpu["name"] for gpu in facts["gpus"]],
        "drivers": drivers(hardware),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def provenance() -> dict[str, Any]:
    """Date, commit and machine, to begin a result with."""
    from anytorch.devices.bench.suite import commit, today

    return {"date": today(), "commit": commit(), "machine": machine()}
