"""The results of serve.py and serve_load.py as text for docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

MIB = 2**20


def place(report: dict[str, Any]) -> str:
    where = report["machine"]
    return (
        f"{where['cores']} cores of {where['cpu']} (load average {where['load_average']:.1f} at the start), "
        f"Python {where['python']}, {report['date'][:10]}, commit {report['commit']}"
    )


def serving(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [
        f"{place(report)}, {report['rounds']} rounds of {report['seconds']:g} s; `bench/results/serve-cpu.json`.",
        f"{versions}.",
        "",
        "| clients | | requests/s | p50 | p99 | CPU time per request | throughput, × the best peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for clients, found in report["results"].items():
        best = max(row["per_second"] for name, row in found.items() if name != "anytorch")
        for name, row in found.items():
            cells = [
                clients,
                name,
                f"{row['per_second']:,.0f}",
                f"{row['p50_ms']:,.1f} ms",
                f"{row['p99_ms']:,.1f} ms",
                f"{row['server_cpu_ms_per_request']:.1f} ms",
                f"{row['per_second'] / best:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    memory = ", ".join(f"{name} {nbytes / MIB:,.0f} MiB" for name, nbytes in report["peak_rss_nbytes"].items())
    starts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report["start_to_ready_s"].items())
    return "\n".join([*lines, "", f"Peak resident memory: {memory}. Start to ready: {starts}."])


def bad_day(report: dict[str, Any]) -> str:
    lines = ["`bench/results/serve-load.json`.", ""]
    if "overload" in report:
        load = report["overload"]
        found, memory = load["result"], load["memory"]
        statuses = ", ".join(f"{count:,} × {status}" for status, count in found["statuses"].items())
        by_minute = ", ".join(f"{row['p99_ms'] / 1e3:.1f}" for row in load["minutes"] if row["p99_ms"])
        growth = memory["growth_nbytes_per_minute_after_first_quarter"] / MIB
        lines += [
            f"- {place(load)}: capacity {load['capacity']['per_second']:.0f} requests/s (32 clients); offered "
            f"{load['offered_per_second']:.0f}/s for {load['seconds'] / 60:.0f} minutes: {statuses}; "
            f"lost without a status: {found['lost_without_a_status']}.",
            f"- Accepted requests: {found['per_second']:.0f}/s, p50 {found['p50_ms'] / 1e3:.1f} s, "
            f"p99 {found['p99_ms'] / 1e3:.1f} s, longest {found['max_ms'] / 1e3:.1f} s; p99 by minute: {by_minute} s.",
            f"- Resident memory: {memory['most_nbytes'] / MIB:.0f} MiB at most, "
            f"{growth:+.2f} MiB a minute after the first quarter.",
        ]
    if "malformed" in report:
        found = report["malformed"]
        lines.append(
            f"- {found['date'][:10]}, commit {found['commit']}: {found['sent']:,} malformed requests in "
            f"{found['seconds']:.0f} s: {found['status_500']} answers with 500, "
            f"{found['wrong_count']} wrong in another way; ready afterwards: {'yes' if found['ready_afterwards'] else 'no'}."
        )
    return "\n".join(lines)
