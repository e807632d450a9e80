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
Event = tuple[str, dict[str, Any]]
RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}(-[0-9]+)?")


class BenchmarkRunner:
    """At most one benchmark at a time: two would measure each other.

    It runs in a task of its own, which readers follow from its first event on: a page that is loaded again finds it. Without
    a reader it is ended, after the time that its request says.
    """

    def __init__(self) -> None:
        self._reserved_at: float | None = None
        self._live: _Live | None = None

    def reserve(self) -> None:
        """Reserve the benchmark. Raises a 409 Problem while another runs. An unused reservation expires."""
        now = time.monotonic()
        if self._live is not None or (self._reserved_at is not None and now - self._reserved_at < LAPSES_S):
            raise Problem(
                409, "benchmark-under-way", "A benchmark is already running", "one benchmark runs at a time",
                hint="wait until it is done, or close the page that runs it",
            )  # fmt: skip
        self._reserved_at = now

    @property
    def running(self) -> schemas.RunningBenchmark:
        if self._live is None:
            return schemas.RunningBenchmark()
        return schemas.RunningBenchmark(seconds=self._live.asked.seconds, devices=self._live.asked.devices)

    async def run(self, asked: schemas.BenchmarkRequest) -> AsyncIterator[Event]:
        """Start it and yield its events: progress, result, problem, then done or failed."""
        live = self._live = _Live(asked)
        live.task = asyncio.create_task(self._measure(live))
        async for one in self._follow(live):
            yield one

    def follow(self) -> AsyncIterator[Event]:
        """The events of the benchmark that runs, from its first one on. Raises a 404 Problem where none does."""
        if self._live is None:
            raise Problem(404, "no-benchmark", "No benchmark is running", "there is none to follow")
        return self._follow(self._live)

    async def stop(self) -> None:
        """End the benchmark that runs, if one does."""
        if self._live is not None and self._live.task is not None:
            self._live.task.cancel()
            await asyncio.wait([self._live.task])

    async def _follow(self, live: _Live) -> AsyncIterator[Event]:
        live.readers += 1
        seen = 0
        try:
            while True:
                while seen < len(live.events):
                    seen += 1
                    yield live.events[seen - 1]
                if live.ended:
                    return
                await live.changed()
        finally:
            live.readers -= 1
            if not live.readers and not live.ended:
                if live.asked.keep_s:
                    live.waiting = asyncio.create_task(self._end_unread(live))
                else:
                    await asyncio.shield(self._ended(live))

    async def _end_unread(self, live: _Live) -> None:
        await asyncio.sleep(live.asked.keep_s)
        if not live.readers:
            await self._ended(live)

    async def _ended(self, live: _Live) -> None:
        assert live.task is not None
        live.task.cancel()
        await asyncio.wait([live.task])

    async def _measure(self, live: _Live) -> None:
        asked = live.asked
        request = json.dumps({"devices": asked.devices, "seconds": asked.seconds, "workloads": asked.workloads})
        process: asyncio.subprocess.Process | None = None
        rows: list[dict[str, Any]] = []
        problems: list[str] = []
        finished = False
        try:
            live.add("progress", {"device": "", "test": "", "fraction": 0.0, "message": "starting"})
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
                            live.add("problem", {"device": device["id"], "test": "the whole run", "message": words})
                    run = keep(rows, problems, asked.seconds, data["report"].get("torch"), partial=False)
                    live.add("done", {"run_id": run.run_id, "rows": rows})
                    continue
                live.add(name, data)
            status = await process.wait()
            if status != 0 and not finished:
                live.add("failed", {"message": f"the measuring process ended with status {status}"})
        except Exception as exc:
            live.add("failed", {"message": f"{type(exc).__name__}: {exc}"})
            raise
        finally:
            if process is not None and process.returncode is None:
                kill_group(process.pid)
                await asyncio.shield(process.wait())
            if rows and not finished:
                keep(rows, problems, asked.seconds, None, partial=True)
            self._live, self._reserved_at = None, None
            live.end()


class _Live:
    """A benchmark under way: its events so far, and how many follow it."""

    def __init__(self, asked: schemas.BenchmarkRequest) -> None:
        self.asked = asked
        self.events: list[Event] = []
        self.readers = 0
        self.ended = False
        self.task: asyncio.Task[None] | None = None
        self.waiting: asyncio.Task[None] | None = None  # for a reader to come back; kept, or it would be collected
        self._news = asyncio.Event()

    def add(self, name: str, data: dict[str, Any]) -> None:
        self.events.append((name, data))
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self) -> None:
        await self._news.wait()


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
