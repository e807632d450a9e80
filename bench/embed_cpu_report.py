"""What `embed_cpu.py` found, as a table for the terminal, as one for docs/benchmarks.md, and against our targets."""

from __future__ import annotations

import statistics
from datetime import datetime
from typing import Any

REFERENCE = "sentence-transformers"
KINDS = ("sentences", "passages")
HEAD = (
    "| | sentences/s, × | passages/s, × | CPU time per sentence, passage: times less | share of GEMM peak | "
    "cosine mean, min | alone and among others | MB | first vector, s |"
)


def targets(tables: dict[str, Any]) -> dict[str, bool]:
    """What the issue asks of us, where it can be told from this run."""
    asked = {"anytorch fp32": (1.5, 1.4), "anytorch int8": (2.5, 2.0)}
    found: dict[str, bool] = {}
    for cores, table in tables.items():
        rows = {name: row for name, row in table["rows"].items() if "error" not in row}
        for name, least in asked.items():
            if name in rows and rows[name]["sentences"]["ratio"] is not None:
                for kind, ratio in zip(KINDS, least):  # noqa: B905
                    found[f"{name}, {cores} cores: {kind} ≥ {ratio}×"] = rows[name][kind]["ratio"] >= ratio
                found[f"{name}, {cores} cores: peak ≤ 250 MB"] = rows[name]["peak_rss_mb"] <= 250
                found[f"{name}, {cores} cores: first vector ≤ 0.6 s"] = rows[name]["cold_s"] <= 0.6
        if any(name in rows for name in asked) and len(rows) > 2:
            for kind in KINDS:
                best = max(rows, key=lambda name: rows[name][kind]["per_s"])
                found[f"{cores} cores: first in {kind}/s"] = best in asked
    return found


def show(result: dict[str, Any]) -> None:
    for cores, table in result["cores"].items():
        peak = table["gemm_gflops"]
        print(f"\n{cores} core(s); GEMM peak {peak:.0f} GFLOP/s" if peak else f"\n{cores} core(s)")
        head = (
            f"{'':32}{'sent/s':>8}{'×':>6}{'pass/s':>8}{'×':>6}{'CPU ms':>8}{'×':>6}{'CPU ms':>8}{'×':>6}{'peak %':>9}"
        )
        print(f"{head}{'cosine mean, min':>20}{'alone':>9}{'MB':>6}{'first s':>8}")
        for name, row in table["rows"].items():
            if "error" in row:
                print(f"{name:32}failed: {row['error']}")
                continue
            short, long = row["sentences"], row["passages"]
            line = f"{name:32}{short['per_s']:8.1f}{times(short['ratio'])}{long['per_s']:8.2f}{times(long['ratio'])}"
            line += f"{short['cpu_ms']:8.2f}{times(short['cpu_ratio'])}{long['cpu_ms']:8.1f}{times(long['cpu_ratio'])}"
            line += f"{100 * short['share_of_peak']:5.0f}/{100 * long['share_of_peak']:3.0f}"
            if "cosine_mean" in short:
                line += f"{short['cosine_mean']:11.6f}{min(short['cosine_min'], long['cosine_min']):9.5f}"
            else:
                line += " " * 20
            alone = "identical" if row.get("alone_identical") else f"{row.get('alone_cosine_min', float('nan')):9.6f}"
            print(
                f"{line}{alone if 'alone_cosine_min' in row else '':>10}{row['peak_rss_mb']:6.0f}{row['cold_s']:7.2f}"
            )
    print()
    for target, met in result["targets"].items():
        print(f"{'met   ' if met else 'MISSED'}  {target}")


def markdown(result: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md: ratios, because seconds of this machine are nobody else's."""
    facts, texts = result["machine"], result["texts"]
    cpu = f"{facts['cpu']} ({', '.join(facts['features'])})"
    lines = [
        f"{result['date'][:10]}, commit {(result['commit'] or 'unknown')[:7]}, {cpu}, {result['rounds']} round(s), "
        f"{texts['sentences']['count']:,} sentences and {texts['passages']['count']} passages"
        + (", a sixth of them in each run (`--quick`)." if result["quick"] else ", shared out over the runs."),
    ]
    for cores, table in result["cores"].items():
        loads = [row["load"] for row in table["rows"].values() if "error" not in row]
        lines += [
            "",
            f"**{cores} core(s)**; load average of the machine meanwhile {statistics.median(loads):.1f}",
            "",
        ]
        lines.append(HEAD)
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for name, row in table["rows"].items():
            if "error" in row:
                lines.append(f"| {name} | failed | | | | | | | |")
                continue
            short, long = row["sentences"], row["passages"]
            alone = (
                "same bits"
                if row.get("alone_identical")
                else f"{row['alone_cosine_min']:.4f}"
                if "alone_cosine_min" in row
                else ""
            )
            close = (
                f"{short['cosine_mean']:.5f}, {min(short['cosine_min'], long['cosine_min']):.4f}"
                if "cosine_mean" in short
                else ""
            )
            lines.append(
                f"| {name} | {times(short['ratio']).strip()} | {times(long['ratio']).strip()} | "
                f"{times(short['cpu_ratio']).strip()}, {times(long['cpu_ratio']).strip()} | "
                f"{100 * short['share_of_peak']:.0f}, {100 * long['share_of_peak']:.0f} % | {close} | {alone} | "
                f"{row['peak_rss_mb']:.0f} | {row['cold_s']:.2f} |"
            )
    compiling = result.get("first_vector_with_compiling_s")
    if compiling:
        words = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiling.items())
        lines += [
            "",
            f"Our kernels are compiled once per machine where no wheel carries them; the first vector then takes: {words}.",
        ]
    missed = [target for target, met in result["targets"].items() if not met]
    lines += [
        "",
        f"Targets: {len(result['targets']) - len(missed)} of {len(result['targets'])} met"
        + (f"; missed: {'; '.join(missed)}." if missed else "."),
    ]
    return "\n".join(lines)


def apart(result: dict[str, Any]) -> list[str]:
    """Contenders that were not measured within a quarter of an hour of the reference: their ratios are worth less."""
    found = []
    for cores, table in result["cores"].items():
        spans = {
            n: [datetime.fromisoformat(at).timestamp() for at in r["measured"]]
            for n, r in table["rows"].items()
            if "measured" in r
        }
        if REFERENCE in spans:
            first, last = spans[REFERENCE]
            found += [f"{n} ({cores} cores)" for n, (a, b) in spans.items() if b < first - 900 or a > last + 900]
    return found


def times(ratio: float | None) -> str:
    return f"{ratio:6.2f}" if ratio is not None else " " * 6
