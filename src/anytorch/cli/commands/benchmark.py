"""`anytorch benchmark`: measured rates of every usable device, answers checked first."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import number
from anytorch.counts import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", nargs="+", default=["all"], metavar="DEVICE", help="devices to measure; all usable ones by default"
    )
    parser.add_argument(
        "--duration", type=number(limits.SECONDS), default=10.0, metavar="SECONDS", help="per device (default: 10)"
    )
    parser.add_argument(
        "--iterations", type=number(limits.ROUNDS), metavar="N", help="timed runs of each case, instead of a duration"
    )
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="what to measure: matmul, bandwidth, launch, copies, transformer"
    )
    parser.add_argument(
        "--batch-sizes", nargs="+", type=number(limits.BATCH), metavar="N", help="of the transformer block"
    )
    parser.add_argument(
        "--seq-lengths", nargs="+", type=number(limits.LENGTH), metavar="N", help="of the transformer block"
    )
    parser.add_argument(
        "--hidden-sizes", nargs="+", type=number(limits.WIDTH), metavar="N", help="of the transformer block"
    )
    parser.add_argument("--dtype", nargs="+", metavar="DTYPE", help="float32, float16, bfloat16, …")
    parser.add_argument("--output", metavar="FILE", help="also write the report as JSON to this file")
    parser.add_argument("--plot", metavar="FILE", help="also draw rates against limits to this .png or .svg file")


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.cli.requests import check_cache, new_file, usable_devices
    from anytorch.devices.bench import benchmark, plot, save
    from anytorch.errors import UsageError

    if options.plot and not options.plot.lower().endswith((".png", ".svg")):  # said before minutes of measuring
        raise UsageError(f"cannot draw to {options.plot!r}: the name must end in .png or .svg")
    for option, text in (("--output", options.output), ("--plot", options.plot)):
        if text is not None:
            new_file(text, option)
    check_cache()
    given: dict[str, Any] = {
        "workloads": options.workloads,
        "batch_sizes": options.batch_sizes,
        "seq_lengths": options.seq_lengths,
        "hidden_sizes": options.hidden_sizes,
        "dtypes": options.dtype,
        "iterations": options.iterations,
    }
    everything = "all" in [name.strip().lower() for name in options.backend]
    named = None if everything else usable_devices(options.backend, "--backend")
    with output.fallbacks_told(), output.progress("benchmark") as progress:
        report = benchmark(
            named,
            duration_s=options.duration,
            progress=progress,
            **{name: value for name, value in given.items() if value is not None},
        )
    if options.output:
        output.note(f"report written to {save(report, options.output)}")
    if options.plot:
        output.note(f"picture written to {plot(report, options.plot)}")
    if output.json:
        output.data(report)
    else:
        show(report, output)
    if report.partial:
        output.warn("interrupted: some rows are missing")
        return 130
    return 1 if any(row.status in ("wrong", "failed") for device in report.devices for row in device.rows) else 0


def show(report: Any, output: Output) -> None:
    from anytorch.devices.bench import relative_to_cpu
    from anytorch.devices.bench.results import busy_words

    for device in report.devices:
        rows = [
            (
                row.workload,
                row.case,
                "" if row.rate is None else f"{row.rate:.4g}",
                row.unit if row.rate is not None else row.status,
                spread_words(row.timing),
                "" if row.share is None else f"{row.share:.0%}",
                "" if row.error is None else f"{row.error:.0e}",
            )
            for row in device.rows
        ]
        columns = ("workload", "case", "rate (median)", "unit", "spread (±)", "of limit (%)", "error (relative)")
        output.table(columns, rows, title=f"{device.id}: {device.name}")
        if busy := busy_words(device.facts):
            output.warn(f"{device.id}: {busy}")
        skipped = Counter(row.reason.partition(":")[0] for row in device.rows if row.status == "skipped")
        for reason, count in skipped.items():
            output.note(f"{device.id}: {counted(count, 'row')} skipped: {reason}")
        for row in device.rows:
            if row.reason and row.status != "skipped":
                output.warn(f"{device.id}, {row.workload}, {row.case}: {row.reason}")
    faster = [
        (name, what, f"{ratio:.1f}") for name, by in relative_to_cpu(report).items() for what, ratio in by.items()
    ]
    if faster:
        output.table(("device", "workload", "speed (CPU = 1)"), faster, title="beside the CPU")
    output.text()
    output.text(f"torch {report.torch}, {report.date}; the answers were checked before the clock started")


def spread_words(timing: Any) -> str:
    """Half the distance of the quartiles, as a share of the median. A single run has none: "±0%" would say it is exact."""
    if timing is None or not timing.median_s:
        return ""
    return "one run" if timing.repeats < 2 else f"±{timing.spread_s / timing.median_s / 2:.0%}"
