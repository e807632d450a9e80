"""What the stand-in did, at the end of a program: for people on standard error, for programs as one line of JSON.

Child processes leave theirs in a folder, and the program's own process adds them up.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytorch.counts import counted
from anytorch.errors import DeviceError
from anytorch.run.ledger import Entry, Ledger, ledger

if TYPE_CHECKING:
    from anytorch.run.place import Place
    from anytorch.run.stand_in import stand_in

MOST = 30  # lines of one list
HOST = "cpu"
Document = dict[str, Any]


def describe(standing: stand_in, started: float, noted: Ledger = ledger) -> Document:
    """One process's report. `seconds` is the time since it began, `cpu_seconds` what its threads computed, and
    `device_seconds` what the device did by its own clock (None: it has none). Forked children that cannot use the device
    have nothing to tell about it."""
    place = standing.place
    chosen = standing.resolution.chosen
    on_cpu: dict[str, int] = getattr(getattr(place, "module", None), "fallback_stats", dict)()
    there = place is not None and not getattr(place.module, "_is_in_bad_fork", bool)()
    return {
        "device": standing.resolution.name,
        "name": chosen.name,
        "processes": 1,
        "redirected": _listed(noted.redirected),
        "on_cpu": on_cpu,
        "ignored": _listed(noted.ignored),
        "refused": _listed(noted.refused),
        "peak_memory": place.highest(0) if there else None,
        "device_seconds": _seconds(place) if there else None,
        "seconds": round(time.monotonic() - started, 3),
        "cpu_seconds": round(time.process_time(), 3),
    }


def _seconds(place: Place) -> float | None:
    try:
        seconds = place.device_seconds()
    except DeviceError:  # it was lost, which the program has been told
        return None
    return None if seconds is None else round(seconds, 3)


def _listed(entries: dict[str, Entry]) -> list[Document]:
    return [{"what": what, "count": entry.count, "first": entry.first} for what, entry in entries.items()]


def together(documents: Sequence[Document]) -> Document:
    """The reports of several processes as one, the program's own first: counts are sums, the peak is the highest."""
    first = documents[0]
    peaks = [document["peak_memory"] for document in documents if document["peak_memory"] is not None]
    worked = [document["device_seconds"] for document in documents if document["device_seconds"] is not None]
    merged: Document = {
        **first,
        "processes": len(documents),
        "peak_memory": max(peaks, default=None),
        "cpu_seconds": round(sum(document["cpu_seconds"] for document in documents), 3),
        "device_seconds": round(sum(worked), 3) if worked else None,
    }
    for key in ("redirected", "ignored", "refused"):
        entries: dict[str, Document] = {}
        for entry in (entry for document in documents for entry in document[key]):
            known = entries.setdefault(entry["what"], {**entry, "count": 0})
            known["count"] += entry["count"]
        merged[key] = sorted(entries.values(), key=lambda entry: -entry["count"])
    on_cpu: dict[str, int] = {}
    for document in documents:
        for name, count in document["on_cpu"].items():
            on_cpu[name] = on_cpu.get(name, 0) + count
    merged["on_cpu"] = dict(sorted(on_cpu.items(), key=lambda item: -item[1]))
    return merged


def words(document: Document) -> str:
    """The report for people."""
    others = document["processes"] - 1
    within = f", in {counted(others + 1, 'process', 'processes')}" if others else ""
    lines = [f"anytorch: {document['device']} ({document['name']}) stood in for cuda{within}"]
    for title, key in (("redirected", "redirected"), ("without effect here", "ignored"), ("refused", "refused")):
        entries = document[key]
        if entries:
            lines.append(f"  {title}:")
            lines += [f"    {e['count']:>8}  {e['what']}  ({e['first'] or 'torch itself'})" for e in entries[:MOST]]
            if len(entries) > MOST:
                lines.append(f"              and {counted(len(entries) - MOST, 'other')}")
    if document["on_cpu"]:
        lines.append("  computed by the CPU, because the device has no kernel:")
        lines += [f"    {count:>8}  {name}" for name, count in list(document["on_cpu"].items())[:MOST]]
    if document["peak_memory"] is not None:
        lines.append(f"  peak memory {document['peak_memory'] / 2**20:,.0f} MiB")
    worked = document["device_seconds"]
    if document["device"] == HOST:
        lines.append(
            f"  {document['seconds']:.1f} s; the CPU, which is the device, worked {worked:.1f} s (all threads)"
        )
    else:
        told = "has no clock that anytorch reads" if worked is None else f"worked {worked:.1f} s by its own clock"
        lines.append(
            f"  {document['seconds']:.1f} s; the device {told}, the CPU {document['cpu_seconds']:.1f} s (all threads)"
        )
    return "\n".join(lines)


def leave(standing: stand_in, folder: Path, started: float) -> None:
    """Leave a child's report for the program's own process; one that has no such process any more leaves none."""
    if folder.is_dir():
        (folder / f"{os.getpid()}.json").write_text(json.dumps(describe(standing, started)), encoding="utf-8")


def tell(standing: stand_in | None, folder: Path, form: str, started: float) -> None:
    """Write the report: JSON is the last line of standard output, words go to standard error."""
    left = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    shutil.rmtree(folder, ignore_errors=True)
    documents = ([] if standing is None else [describe(standing, started)]) + left
    if not documents:
        return
    document = {**together(documents), "seconds": round(time.monotonic() - started, 3)}
    if form == "json":
        print(json.dumps(document), flush=True)  # noqa: T201
    else:
        sys.stderr.write(words(document) + "\n")
