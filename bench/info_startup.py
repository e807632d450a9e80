"""Process CPU time of `anytorch info` beside `accelerate env` and `python -m torch.utils.collect_env`.

All three run in one process tree, interleaved, after one warm-up each (which also writes everybody's byte code). CPU
time is user + system time of the child and all it starts, by getrusage: it depends far less on the load of the machine
than wall time does. The answers are checked first: info must name the CPU and the torch that collect_env prints.

What it does not show: the two others import torch and ask it, so they know whether CUDA initialises; `anytorch info`
says "seen, not tried" and leaves that to `info --probe`.

python bench/info_startup.py [--repeats 10] [--output bench/results/info_startup.json]
Exit status 1 if a target is missed: at most 80 ms of CPU time, at least 20 times less than either.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

MOST_CPU_MS = 80.0
LEAST_RATIO = 20.0
OURS = "anytorch info"


def commands() -> dict[str, list[str]]:
    found = {
        OURS: [sys.executable, "-m", "anytorch", "info"],
        "torch.utils.collect_env": [sys.executable, "-m", "torch.utils.collect_env"],
    }
    if find_spec("accelerate") is not None:
        # The console script's own two lines, so that the result does not depend on where it is installed.
        start = (
            "import sys; sys.argv = ['accelerate', 'env']; from accelerate.commands.accelerate_cli import main; main()"
        )
        found["accelerate env"] = [sys.executable, "-c", start]
    return found


def environment() -> dict[str, str]:
    """Byte code is cached, as in any normal installation, whatever this shell says."""
    hidden = ("PYTHONDONTWRITEBYTECODE", "PYTHONPROFILEIMPORTTIME", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def cpu_ms(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def check_answers(tools: dict[str, list[str]]) -> dict[str, str]:
    """Both name the same torch and the same CPU, or the comparison means nothing."""

    def output(command: list[str]) -> str:
        return subprocess.run(command, env=environment(), check=True, capture_output=True, text=True).stdout

    document = json.loads(output([*tools[OURS], "--json"]))
    told = output(tools["torch.utils.collect_env"])
    torch, model = document["torch"]["version"], document["cpu"]["model"]
    if f"PyTorch version: {torch}" not in told:
        raise SystemExit(f"the answers differ: info says torch {torch}, collect_env does not")
    if model not in told:
        raise SystemExit(f"the answers differ: info says the CPU is {model}, collect_env does not")
    return {"torch": torch, "cpu": model, "python": document["machine"]["python"]}


def measure(repeats: int) -> dict[str, Any]:
    tools = commands()
    facts = check_answers(tools)
    bare = [sys.executable, "-c", "pass"]
    times: dict[str, list[float]] = {name: [] for name in (*tools, "bare interpreter")}
    for command in tools.values():
        cpu_ms(command)  # warm-up
    for _ in range(repeats):
        for name, command in {**tools, "bare interpreter": bare}.items():
            times[name].append(cpu_ms(command))
    rows = {
        name: {
            "min_ms": round(min(values), 1),
            "median_ms": round(statistics.median(values), 1),
            "repeats": len(values),
        }
        for name, values in times.items()
    }
    ours = rows[OURS]["median_ms"]
    ratios = {name: round(row["median_ms"] / ours, 1) for name, row in rows.items() if name in tools and name != OURS}
    made = provenance()
    return {
        "benchmark": "info_startup",
        **made,
        "machine": made["machine"] | facts,
        "cpu_ms": rows,
        "times_less": ratios,
        "targets": {"most_cpu_ms": MOST_CPU_MS, "least_ratio": LEAST_RATIO},
        "met": ours <= MOST_CPU_MS and bool(ratios) and min(ratios.values()) >= LEAST_RATIO,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = measure(options.repeats)
    print(f"{'CPU time of one process':28}{'min (ms)':>10}{'median (ms)':>13}{'times ours':>12}")
    for name, row in result["cpu_ms"].items():
        ratio = result["times_less"].get(name)
        print(f"{name:28}{row['min_ms']:>10}{row['median_ms']:>13}{ratio if ratio else '':>12}")
    print(f"targets: at most {MOST_CPU_MS:g} ms and {LEAST_RATIO:g} times less: {'met' if result['met'] else 'MISSED'}")
    if options.output:
        write_results(options.output, result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
