"""PyTorch's own operator suite (OpInfo) on the webgpu device, against the CPU.

    python -m tests.webgpu.opinfo --all --jobs 2 --output docs/reference/webgpu-operators.json
    python -m tests.webgpu.opinfo --rotation 7 --of 60 --seconds 60
    python -m tests.webgpu.opinfo add linalg.svd --dtypes float32        # some ops, every sample's verdict

Every entry of `op_db`, in each dtype it supports of DTYPES, forward and (floating dtypes) backward, SAMPLES samples
each, the first one non-contiguous too, and the in-place form where there is one. A verdict per entry and dtype:

    agree            every sample's results and gradients equal the CPU's within the dtype's error
    wrong            one does not
    error            one raised where the CPU did not, or the process died or hung
    not comparable   the CPU itself cannot, or the sample is of a kind no dense device has (sparse layouts)

Ops run in worker processes (`opinfo_examiner`): a crash costs one entry, which is then listed with the signal that ended it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.webgpu.opinfo_examiner import DTYPES, SAMPLES, Verdict

REPOSITORY = Path(__file__).resolve().parents[2]
LAVAPIPE = REPOSITORY / ".cache" / "mesa" / "lvp.json"
TIME_OUT_S = 180.0
START_S = 240.0  # importing op_db takes some seconds on an idle machine, minutes on a busy one


def environment() -> dict[str, str]:
    found = dict(os.environ)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY / "src"), found.get("PYTHONPATH", "")]))
    found["ANYTORCH_WEBGPU_FALLBACK"] = "silent"
    found.setdefault("XDG_RUNTIME_DIR", "/tmp")
    if "VK_ICD_FILENAMES" not in found and "VK_DRIVER_FILES" not in found and LAVAPIPE.exists():
        found["VK_ICD_FILENAMES"] = str(LAVAPIPE)
    return found


class Worker:
    """A worker process; started again whenever it has died or been ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.tasks: list[tuple[str, str]] = []
        self.said = ""

    def start(self) -> None:
        import tempfile

        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.webgpu.opinfo_examiner"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment(),
        )
        answer = self._answer(START_S)
        if answer is None:
            raise RuntimeError(f"the worker did not start: {self.end()}")
        self.tasks = [tuple(task) for task in answer["ready"]]

    def _answer(self, timeout_s: float) -> Any:
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def end(self) -> str:
        """End the process; says how it went."""
        process, self.process = self.process, None
        assert process is not None
        try:
            code: int | None = process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        for stream in (process.stdin, process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # a task the dead process never read
                    stream.close()
        self.errors.seek(0)
        last = self.errors.read().strip().splitlines()[-1:]
        self.errors.close()
        if code is None:
            return "no answer in time"
        if code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with status {code}: {' '.join(last)[:200]}"

    def do(self, op: str, dtype: str, every: bool, timeout_s: float) -> Verdict:
        if self.process is None:
            self.start()
        assert self.process is not None and self.process.stdin is not None
        started = time.monotonic()
        try:
            self.process.stdin.write(json.dumps({"op": op, "dtype": dtype, "every": every}) + "\n")
            self.process.stdin.flush()
            answer = self._answer(timeout_s)
        except BrokenPipeError:
            answer = None
        if answer is None:
            return Verdict(op, dtype, "error", self.end(), seconds=round(time.monotonic() - started, 2))
        return Verdict(**answer)

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.end()


def place(op: str) -> int:
    """A number that stays with an op's name, for the rotation."""
    return int.from_bytes(hashlib.sha256(op.encode()).digest()[:4], "big")


def chosen(tasks: Sequence[tuple[str, str]], rotation: int, of: int) -> list[tuple[str, str]]:
    """The part of the sweep for one rotation; in `of` rotations each entry comes once."""
    return sorted((t for t in tasks if place("/".join(t)) % of == rotation % of), key=lambda t: place("/".join(t)))


def sweep(
    tasks: Sequence[tuple[str, str]] | None,
    *,
    jobs: int = 1,
    seconds: float | None = None,
    every: bool = False,
    timeout_s: float = TIME_OUT_S,
    pick: Any = None,
    quiet: bool = False,
) -> Iterator[Verdict]:
    """Verdicts as they come. `tasks` None: all, or what `pick` keeps of all. `seconds` counts from the first answer."""
    first = Worker()
    first.start()
    wanted = list(first.tasks if tasks is None else tasks)
    if pick is not None:
        wanted = pick(wanted)
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for task in wanted:
        todo.put(task)
    done: queue.SimpleQueue[Verdict | None] = queue.SimpleQueue()
    deadline = None if seconds is None else time.monotonic() + seconds

    def run(worker: Worker) -> None:
        try:
            while deadline is None or time.monotonic() < deadline:
                try:
                    op, dtype = todo.get_nowait()
                except queue.Empty:
                    break
                done.put(worker.do(op, dtype, every, timeout_s))
            worker.close()
        finally:
            done.put(None)

    workers = [first, *[Worker() for _ in range(jobs - 1)]]
    for worker in workers:
        threading.Thread(target=run, args=(worker,), daemon=True).start()
    finished = 0
    while finished < len(workers):
        verdict = done.get()
        if verdict is None:
            finished += 1
            continue
        yield verdict


def report(verdicts: Sequence[Verdict], seconds: float) -> str:
    totals = Counter(v.status for v in verdicts)
    lines = []
    for status in ("wrong", "error", "not comparable"):
        for verdict in verdicts:
            if verdict.status == status:
                lines.append(f"{status:14}  {verdict.op}  {verdict.dtype}  {verdict.reason}")
    comparable = totals["agree"] + totals["wrong"] + totals["error"]
    clean = sum(v.status == "agree" and not v.fallbacks for v in verdicts)
    kinds = sum(v.status == "agree" and v.kind_only == v.compared for v in verdicts)
    near = sum(v.status == "agree" and v.as_near > 0 for v in verdicts)
    entries = {v.op for v in verdicts}
    bad = {v.op for v in verdicts if v.status in ("wrong", "error")}
    lines.append(
        f"{len(verdicts)} entries x dtypes in {seconds:.0f} s: "
        f"{totals['agree']} agree ({clean} of them without the CPU; {kinds} random ones by shape and dtype only; "
        f"{near} beyond the tolerance but as near to the exact result as the CPU), "
        f"{totals['wrong']} wrong, {totals['error']} error, {totals['not comparable']} not comparable; "
        f"{totals['agree'] / max(comparable, 1):.2%} of the comparable agree; "
        f"{len(entries) - len(bad)} of {len(entries)} op entries without trouble"
    )
    return "\n".join(lines)


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What is kept of a sweep: no times and no order of running, so that the file changes only when a verdict does."""
    import torch

    totals: dict[str, Counter[str]] = {dtype: Counter() for dtype in DTYPES}
    entries: dict[str, dict[str, Any]] = {}
    troubles = []
    for verdict in sorted(verdicts, key=lambda v: (v.op, DTYPES.index(v.dtype))):
        counted = totals[verdict.dtype]
        counted[verdict.status] += 1
        counted["without the CPU"] += verdict.status == "agree" and not verdict.fallbacks
        counted["by kind only"] += verdict.status == "agree" and verdict.kind_only == verdict.compared
        counted["as near as the CPU"] += verdict.status == "agree" and verdict.as_near > 0
        entry = entries.setdefault(verdict.op, {})
        entry.setdefault(verdict.status, []).append(verdict.dtype)
        if verdict.fallbacks:
            entry["fallbacks"] = sorted({*entry.get("fallbacks", []), *verdict.fallbacks})
        if verdict.status in ("wrong", "error"):
            troubles.append({name: getattr(verdict, name) for name in ("op", "dtype", "status", "reason")})
    return {
        "torch": torch.__version__.split("+")[0],
        "samples": SAMPLES,
        "totals": {dtype: dict(sorted(counted.items())) for dtype, counted in totals.items() if counted},
        "troubles": troubles,
        "entries": entries,
    }


def write(path: Path, verdicts: Sequence[Verdict]) -> None:
    found = summary(verdicts)
    entries = found.pop("entries")
    lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(entry)}" for op, entry in entries.items())
    head = json.dumps(found, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "entries": {{\n{lines}\n }}\n}}\n', "utf-8")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ops", nargs="*", help="names of entries (op or op.variant; a trailing * matches the rest)")
    parser.add_argument("--all", action="store_true", help="the whole sweep")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rotation", type=int, help="one part of the sweep")
    parser.add_argument("--of", type=int, default=60, help="in how many parts the sweep is cut")
    parser.add_argument("--seconds", type=float, help="start no further op after this long")
    parser.add_argument("--every", action="store_true", help="every sample instead of a few")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    dtypes = options.dtypes.split(",")

    def pick(tasks: list[tuple[str, str]]) -> list[tuple[str, str]]:
        tasks = [task for task in tasks if task[1] in dtypes]
        if options.rotation is not None:
            return chosen(tasks, options.rotation, options.of)
        if options.all:
            return tasks
        import fnmatch

        return [t for t in tasks if any(fnmatch.fnmatchcase(t[0], name) for name in options.ops)]

    started = time.monotonic()
    verdicts = []
    for verdict in sweep(None, jobs=options.jobs, seconds=options.seconds, every=options.every, pick=pick):
        verdicts.append(verdict)
        if verdict.status in ("wrong", "error") or options.ops:
            note = f" [CPU: {', '.join(verdict.fallbacks)}]" if verdict.fallbacks else ""
            done = f"{verdict.compared}/{verdict.samples}"
            sys.stderr.write(f"{verdict.status} {verdict.op} {verdict.dtype} {done} {verdict.reason}{note}\n")
        if options.output is not None and len(verdicts) % 100 == 0:
            write(options.output, verdicts)
    print(report(verdicts, time.monotonic() - started))
    if options.output is not None:
        write(options.output, verdicts)
    return 1 if any(v.status in ("wrong", "error") for v in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
