"""Benchmarks that clients start: one at a time, each in a child process that ends with its reader; earlier runs are stored.

The child calls `main([request])`, which writes one JSON document per line to standard output: a driver that crashes while
it is measured takes that process with it and not the service.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from anytorch import logs, settings
from anytorch.child_process import OWN_GROUP, kill_group, python_command
from anytorch.devices.bench import Row, benchmark
from anytorch.devices.bench.results import busy_words
from anytorch.devices.bench.workloads import workload_names
from anytorch.devices.choose import resolve
from anytorch.devices.types import Candidate
from anytorch.errors import AnytorchError, DeviceError, UsageError
from anytorch.files import replace_file
from anytorch.probe.facts import as_json
from anytorch.serve import schemas
from anytorch.serve.problems import Problem

log = logs.logger(__name__)

KEPT = 50  # runs
LAPSES_S = 10.0  # a client that is gone before its stream begins
LINE_NBYTES = 16 * 2**20  # of one line: the report of many devices
RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}(-[0-9]+)?")


class BenchmarkRunner:
    """At most one benchmark at a time: two would measure each other."""

    def __init__(self) -> None:
        self._reserved_at: float | None = None
        self._started = False

    def reserve(self) -> None:
        """Reserve the benchmark. Raises a 409 Problem while another runs. An unused reservation expires."""
        now = time.monotonic()
        if self._reserved_at is not None and (self._started or now - self._reserved_at < LAPSES_S):
            raise Problem(
                409, "benchmark-under-way", "A benchmark is already running", "one benchmark runs at a time",
                hint="wait until it is done, or close the page that runs it",
            )  # fmt: skip
        self._reserved_at, self._started = now, False

    async def run(self, asked: schemas.BenchmarkRequest) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield events: progress, result, problem, then done or failed. Ending the iteration early stops the benchmark."""
        request = json.dumps({"devices": asked.devices, "seconds": asked.seconds, "workloads": asked.workloads})
        process: asyncio.subprocess.Process | None = None
        rows: list[dict[str, Any]] = []
        problems: list[str] = []
        finished = False
        self._started = True
        try:
            yield "progress", {"device": "", "test": "", "fraction": 0.0, "message": "starting"}
            process = await asyncio.create_subprocess_exec(
                *python_command(f"{__name__}:main", request), start_new_session=OWN_GROUP,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, limit=LINE_NBYTES,
            )  # fmt: skip
            assert process.stdout is not None
            async for line in process.stdout:
                told = json.loads(line)
                name, data = told["event"], told["data"]
                if name == "result":
                    rows.append(data)
                elif name == "problem":
                    problems.append(f"{data['device']}, {data['test']}: {data['message']}")
                elif name == "report":
                    finished = True
                    # The limits are known at the end: the best that was measured is one.
                    rows = rows_of(data["report"])
                    for device in data["report"]["devices"]:
                        if words := busy_words(device["facts"]):
                            problems.append(f"{device['id']}: {words}")
                            yield "problem", {"device": device["id"], "test": "the whole run", "message": words}
                    run = keep(rows, problems, asked.seconds, data["report"].get("torch"), partial=False)
                    yield "done", {"run_id": run.run_id, "rows": rows}
                    continue
                yield name, data
            status = await process.wait()
            if status != 0 and not finished:
                yield "failed", {"message": f"the measuring process ended with status {status}"}
        finally:
            self._reserved_at, self._started = None, False
            if process is not None and process.returncode is None:
                kill_group(process.pid)
                await asyncio.shield(process.wait())
            if rows and not finished:
                keep(rows, problems, asked.seconds, None, partial=True)


def row_of(device: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A measured row as the page shows it."""
    return {
        "device": device,
        "test": f"{row['workload']}, {row['case']}",
        **{name: row[name] for name in ("rate", "unit", "limit", "share")},
    }


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    measured = [(device["id"], row) for device in report["devices"] for row in device["rows"]]
    return [row_of(device, row) for device, row in measured if row["status"] == "ok" and row["rate"] is not None]


# --- earlier runs --------------------------------------------------------------------------------------------------------


def folder() -> Path:
    return settings.cache_folder() / "benchmarks"


def keep(
    rows: list[dict[str, Any]], problems: list[str], seconds: float, torch: str | None, *, partial: bool
) -> schemas.BenchmarkRun:
    when = time.gmtime()
    name = stem = time.strftime("%Y%m%d-%H%M%S", when)
    number = 1
    while (folder() / f"{name}.json").exists():
        number += 1
        name = f"{stem}-{number}"
    run = schemas.BenchmarkRun(
        run_id=name, when=time.strftime("%Y-%m-%dT%H:%M:%SZ", when), seconds=seconds, partial=partial, torch=torch,
        rows=[schemas.BenchmarkRow(**row) for row in rows], problems=problems,
    )  # fmt: skip
    try:
        replace_file(folder() / f"{name}.json", run.model_dump_json().encode())
        for old in sorted(folder().glob("*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("the benchmark was not stored: %s", exc)
    return run


def earlier() -> list[schemas.BenchmarkRun]:
    """Earlier runs, newest first. An unreadable file is skipped and logged."""
    found = []
    for path in sorted(folder().glob("*.json"), reverse=True):
        if not RUN_ID.fullmatch(path.stem):
            continue
        try:
            found.append(schemas.BenchmarkRun.model_validate_json(path.read_bytes()))
        except (OSError, ValueError) as exc:
            log.warning("%s is left out: %s", path, exc)
    return found


def check(asked: schemas.BenchmarkRequest) -> None:
    """Raise for invalid devices and workloads, before anything streams."""
    workload_names(asked.workloads)
    for name in asked.devices or ():
        try:
            resolve(name, strict=True)
        except DeviceError as exc:
            raise UsageError(exc.message, hint=exc.hint) from exc


# --- in the child --------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    asked = json.loads(arguments[0])
    stream, sys.stdout = sys.stdout, sys.stderr  # whatever else prints must not get between the lines

    def tell(name: str, **data: Any) -> None:
        stream.write(json.dumps({"event": name, "data": data}) + "\n")
        stream.flush()

    def progress(done: int, total: int, what: str) -> None:
        device, _, test = what.partition(": ")
        tell("progress", device=device, test=test, fraction=done / total if total else 1.0, message=what or "done")

    def found(device: Candidate, row: Row) -> None:
        if row.ok and row.rate is not None:
            tell("result", **row_of(device.id, vars(row)))
        elif row.status != "skipped":
            tell("problem", device=device.id, test=f"{row.workload}, {row.case}", message=row.reason or row.status)

    try:
        report = benchmark(
            asked["devices"], duration_s=asked["seconds"], workloads=asked["workloads"], progress=progress, found=found
        )
    except AnytorchError as exc:
        tell("failed", kind=type(exc).__name__, message=exc.message, hint=exc.hint)
        return 1
    tell("report", report=as_json(report))
    return 0
