"""How much faster than the CPU is each device of this machine? (Requirement A8.)

    python bench/backends.py [--duration 30] [--devices cuda cpu] [--output bench/results/backends-<machine>.json]

Runs `anytorch.devices.bench` on the CPU and on every other usable device, answers checked against fp64 first, and
prints each device's rate, its share of the limit, and the ratio to the CPU of the same machine in float32. What the
numbers do not show: other CPUs (a ratio to a slow CPU is a large ratio), training, and whole models. Without an
accelerator there is nothing to compare, and it says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from provenance import provenance, write_results

from anytorch.devices.bench import BenchmarkReport, benchmark, relative_to_cpu
from anytorch.devices.bench.suite import usable_devices
from anytorch.errors import AnytorchError
from anytorch.probe.facts import as_json

# What the source document promises (requirement A8), by back end: times faster than the CPU.
CLAIMS = {"cuda": (10, 50), "rocm": (8, 40), "xpu": (5, 20), "mps": (3, 15), "webgpu": (2, 10)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--duration", type=float, default=30.0, metavar="S", help="seconds per device (default: 30)")
    parser.add_argument("--devices", nargs="+", metavar="DEVICE", help="these instead of every usable one")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the whole report as JSON")
    options = parser.parse_args(arguments)
    try:
        named = options.devices or [device.id for device in usable_devices(None)]
        # The CPU is the reference and is always measured, in the same process and the same hour.
        report = benchmark(list(dict.fromkeys(["cpu", *named])), duration_s=options.duration, progress=show)
        sys.stderr.write("\r\033[K")
        sys.stdout.write(text(report))
        if options.output:
            write_results(options.output, {**provenance(), "report": as_json(report)})
            print(f"written: {options.output}")
    except AnytorchError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return exc.exit_code
    return 130 if report.partial else 0


def show(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K[{done}/{total}] {what}")
        sys.stderr.flush()


def text(report: BenchmarkReport) -> str:
    lines = [f"torch {report.torch}, anytorch {report.anytorch}, commit {report.commit}, {report.date}"]
    lines.append(
        f"{report.machine['cpu']}, {report.machine['cores']['usable']} usable cores, driver {dict(report.driver)}"
    )
    if report.partial:
        lines.append("INTERRUPTED: rows are missing")
    for device in report.devices:
        lines += ["", f"{device.id}: {device.name} ({device.facts['threads']} host threads)"]
        if device.facts["disturbed"] > 0.5:
            lines.append("  the machine was busy with other work: these numbers are too low")
        for row in device.rows:
            if row.timing is None:
                lines.append(f"  {row.workload:<12} {row.case:<46} {row.status}: {row.reason}")
                continue
            share = f"{row.share:6.1%} of {row.limit:.4g} ({row.limit_source})" if row.share is not None else ""
            spread = f"± {row.timing.spread_s / 2 / row.timing.median_s:.0%}"
            lines.append(f"  {row.workload:<12} {row.case:<46} {row.rate:10.4g} {row.unit:<8} {spread:<6} {share}")
    ratios = relative_to_cpu(report)
    if not ratios:
        lines += ["", "only the CPU is usable here: nothing to compare with"]
    for device in report.devices:
        if device.id not in ratios:
            continue
        low, high = CLAIMS.get(device.backend, (None, None))
        claim = f" (claimed: {low} to {high} times)" if low else ""
        lines += ["", f"{device.id} relative to the CPU in float32{claim}"]
        lines += [f"  {name:<58} {ratio:8.1f} ×" for name, ratio in ratios[device.id].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
