"""What the stand-in did, at the end of a program: for people on standard error, for programs as one line of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from anytorch.counts import counted
from anytorch.run.ledger import Entry, Ledger, ledger
from anytorch.run.stand_in import stand_in

MOST = 30  # lines of one list


def describe(standing: stand_in, started: float, noted: Ledger = ledger) -> dict[str, Any]:
    """The report as a document. `seconds` is the time since the process began, `cpu_seconds` what its threads computed."""
    place = standing.place
    chosen = standing.resolution.chosen
    on_cpu: dict[str, int] = getattr(getattr(place, "module", None), "fallback_stats", dict)()
    return {
        "device": standing.resolution.name,
        "name": chosen.name,
        "redirected": _listed(noted.redirected),
        "on_cpu": dict(sorted(on_cpu.items(), key=lambda item: -item[1])),
        "ignored": _listed(noted.ignored),
        "refused": _listed(noted.refused),
        "peak_memory": None if place is None else place.peak(0),
        "seconds": round(time.monotonic() - started, 3),
        "cpu_seconds": round(time.process_time(), 3),
    }


def _listed(entries: dict[str, Entry]) -> list[dict[str, Any]]:
    ordered = sorted(entries.items(), key=lambda item: -item[1].count)
    return [{"what": what, "count": entry.count, "first": entry.first} for what, entry in ordered]


def words(document: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"anytorch: {document['device']} ({document['name']}) stood in for cuda"]
    for title, key in (("redirected", "redirected"), ("without effect here", "ignored"), ("refused", "refused")):
        entries = document[key]
        if entries:
            lines.append(f"  {title}:")
            lines += [f"    {e['count']:>8}  {e['what']}  ({e['first'] or 'torch itself'})" for e in entries[:MOST]]
            if len(entries) > MOST:
                lines.append(f"              and {counted(len(entries) - MOST, 'other')}")
    if document["on_cpu"]:
        lines.append("  computed by the CPU, for want of a kernel:")
        lines += [f"    {count:>8}  {name}" for name, count in list(document["on_cpu"].items())[:MOST]]
    if document["peak_memory"] is not None:
        lines.append(f"  peak memory {document['peak_memory'] / 2**20:,.0f} MiB")
    lines.append(
        f"  {document['seconds']:.1f} s, of which the CPU computed {document['cpu_seconds']:.1f} s (all threads)"
    )
    return "\n".join(lines)


def tell(standing: stand_in, form: str, started: float) -> None:
    """Write the report: JSON is the last line of standard output, words go to standard error."""
    document = describe(standing, started)
    if form == "json":
        print(json.dumps(document), flush=True)  # noqa: T201
    else:
        sys.stderr.write(words(document) + "\n")
