"""Where a result comes from: script, date, commit, versions, and the machine with the CPU's features.

A ratio depends on them: integer kernels gain far more on a CPU with VNNI than on one without. `write_results` is the only
way into bench/results/; tests/docs/test_results.py reads every file there and refuses one that does not say whence it is.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(
    [
        "anytorch",
        "torch",
        "numpy",
        "transformers",
        "sentence-transformers",
        "tokenizers",
        "safetensors",
        "accelerate",
        "triton",
        "onnxruntime",
        "openvino",
        "ctranslate2",
        "fastembed",
        "infinity-emb",
        "torchao",
        "bitsandbytes",
        "wgpu",
        "tinygrad",
        "fastapi",
        "uvicorn",
        "pandas",
        "pyarrow",
    ]
)

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


def generation() -> str:
    """ "family 26, model 2" where Linux tells it: virtual machines of several generations call themselves "AMD EPYC"."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    told = dict(reversed([line.split(":", 1) for line in lines if ":" in line]))  # the first core's
    found = {name.strip(): value.strip() for name, value in told.items()}
    if "cpu family" not in found:
        return ""
    return f"family {found['cpu family']}, model {found.get('model', '?')}"


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
        "cpu_generation": generation(),
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


def versions() -> dict[str, str]:
    """What is installed beside this script, of the packages a result can depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> tuple[str | None, bool | None]:
    """The commit that runs, and whether anything was changed since; (None, None) where neither is known.

    ANYTORCH_COMMIT (a hash, perhaps with "-dirty") says it on a machine to which a copy was sent without its history.
    """
    told = os.environ.get("ANYTORCH_COMMIT")
    if told is None:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        told = done.stdout.strip() if done.returncode == 0 else None
    return (None, None) if not told else (told.removesuffix("-dirty"), told.endswith("-dirty"))


def chosen_since(began: str) -> list[dict[str, Any]]:
    """What was chosen by measuring since then ("2026-11-19T23:25:00Z"), with the time of each candidate, or the reason
    against it."""
    from anytorch.measured.store import verdicts

    return [
        {
            "what": f"{one.question.kind}, {one.question.title}",
            "chosen": one.chosen,
            "us": {trial.name: round(1e6 * trial.seconds, 2) for trial in one.trials if trial.seconds is not None},
            "refused": {trial.name: trial.refused for trial in one.trials if trial.refused},
        }
        for one in verdicts()
        if one.when >= began
    ]


def provenance() -> dict[str, Any]:
    """Script, arguments, date, commit, versions and machine, to begin a result with."""
    from anytorch.devices.bench.suite import today

    found, dirty = commit()
    script = Path(sys.argv[0]).resolve()
    return {
        "script": script.relative_to(ROOT).as_posix() if script.is_relative_to(ROOT) else script.name,
        "arguments": sys.argv[1:],
        "date": today(),
        "commit": found,
        "dirty": dirty,
        "versions": versions(),
        "machine": machine(),
    }


SHAPES: dict[str, type | tuple[type, ...]] = {
    "script": str,
    "arguments": list,
    "date": str,
    "commit": (str, type(None)),
    "dirty": (bool, type(None)),
    "versions": dict,
    "machine": dict,
}


def lacking(report: Any) -> list[str]:
    """What of `provenance()` a report does not have, or has overwritten with something else."""
    if not isinstance(report, dict):
        return list(SHAPES)
    wrong = [name for name, kind in SHAPES.items() if name not in report or not isinstance(report[name], kind)]
    if "versions" not in wrong and "torch" not in report["versions"]:
        wrong.append("versions")
    if "machine" not in wrong and not {"cpu", "features", "cores"} <= report["machine"].keys():
        wrong.append("machine")
    return wrong


def write_results(path: Path, report: dict[str, Any]) -> None:
    """Write a report, which begins with `provenance()`, to a file. Raises ValueError for one that does not."""
    from anytorch.files import replace_file

    if wrong := lacking(report):
        raise ValueError(f"a results file begins with provenance(): wrong or missing are {', '.join(wrong)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, default=str, ensure_ascii=False)
    replace_file(path, f"{text}\n".encode())  # whole or not at all: some benches write after every part
