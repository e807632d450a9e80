"""Run fuzz targets: `python -m tests.fuzz.run TARGET… --seconds 60`, or `make fuzz TARGET=… SECONDS=…`; "all" for all.

An input that breaks a target's promise is written to .cache/fuzz/findings/TARGET/ with what it raised; a Python target goes
on after it, so that one run tells of all it finds. The corpus of a run stays in .cache/fuzz/corpus/TARGET/, and the next run
begins with it; `--keep` writes some of it to tests/fuzz/corpus/, for the tests to replay.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import atheris

# Before anything else imports a module of ours: atheris sees only what it has changed while it was imported.
with (
    contextlib.redirect_stderr(io.StringIO()),
    atheris.instrument_imports(include=["anytorch"], enable_loader_override=False),
):
    from tests.fuzz import kit
    from tests.fuzz.mutate import mutated
    from tests.fuzz.native import build

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".cache" / "fuzz"
MEMORY_MB = 3072  # resident; torch and pandas alone are several hundred
TIMEOUT_S = 120  # of one input; a busy machine may stop a process for many seconds
START_S = 300  # for the corpus, and for an input that hangs to be told as one
EXECUTED = re.compile(rb"number_of_executed_units:\s*(\d+)")


@dataclass(frozen=True)
class Outcome:
    target: str
    executions: int
    seconds: float
    findings: tuple[str, ...]  # paths of inputs, or what else went wrong
    log: str  # the end of what the fuzzer said


def python_targets() -> list[str]:
    """Import the readers so that atheris sees where their inputs lead; their names."""
    with (
        contextlib.redirect_stderr(io.StringIO()),
        atheris.instrument_imports(include=["anytorch"], enable_loader_override=False),
    ):
        import tests.fuzz.readers  # noqa: F401  (they register themselves)
    kit.scratch.empty()  # one folder for all: a fork ends without removing its own
    return sorted(kit.TARGETS)


def fuzz(name: str, seconds: int, home: Path, seed: int = 0) -> Outcome:
    """Fuzz one target for some seconds in a process of its own."""
    corpus, findings = home / "corpus" / name, home / "findings" / name
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for data in kit.kept(name):
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-report_slow_units={TIMEOUT_S}",
        f"-seed={seed}",
        "-print_final_stats=1",
        f"-artifact_prefix={findings}/",
    ]
    before, began = set(findings.iterdir()), time.monotonic()
    with tempfile.TemporaryFile() as said:
        if name in build.SETS:
            one = build.SETS[name]
            limits = [f"-max_len={one.longest}", f"-timeout={TIMEOUT_S}"]
            command = [str(build.built(one, HOME / "build")), *limits, *options, str(corpus)]
            began = time.monotonic()
            pid = subprocess.Popen(
                command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env={**os.environ, **build.OPTIONS}
            ).pid
        else:
            pid = forked(lambda: child(kit.TARGETS[name], findings, [*options, str(corpus)]), said.fileno())
        code = ended(pid, seconds + START_S)
        said.seek(0)
        log = said.read()
    executed = EXECUTED.findall(log)
    new = sorted(str(path) for path in set(findings.iterdir()) - before if path.suffix != ".txt")
    if code and not new:
        new = [f"{name} ended with status {code}"]
    tail = log[-4000:].decode(errors="replace")
    return Outcome(name, int(executed[-1]) if executed else 0, time.monotonic() - began, tuple(new), tail)


def forked(work: Callable[[], Any], said: int) -> int:
    """The process that does `work`, with what it says in the file `said`: a fork has the readers without importing them."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.dup2(said, 1)
        os.dup2(said, 2)
        try:
            work()
        finally:
            os._exit(1)  # libFuzzer ends the process itself
    return pid


def ended(pid: int, most_s: float) -> int:
    """The status a process ends with; one that does not in time is killed."""
    until = time.monotonic() + most_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def child(one: kit.Target, findings: Path, options: list[str]) -> None:
    """Fuzz a target in this process, which ends with it."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    known: set[str] = set()

    def run(data: bytes) -> None:
        exc = kit.finding(one, data)
        if exc is None:
            return
        what = kit.place_of(exc)
        if what not in known:
            known.add(what)
            path = findings / hashlib.sha1(what.encode()).hexdigest()[:16]
            path.write_bytes(data)
            words = f"{one.name}: {what}\n{exc!s:.2000}\n{data!r}\n"
            path.with_suffix(".txt").write_text(words, encoding="utf-8", errors="replace")

    seeds = kit.kept(one.name)

    def changed(data: bytes, most: int, seed: int) -> bytes:
        if seeds and seed % 4 == 0:
            data = seeds[
                seed // 4 % len(seeds)
            ]  # most of a corpus is refused early: begin at what is valid now and then
        return mutated(one.form, data, most, seed, one.words, atheris.Mutate)

    arguments = [sys.argv[0], f"-max_len={one.longest}", f"-timeout={TIMEOUT_S}", *options]
    atheris.Setup(arguments, run, custom_mutator=changed)
    atheris.Fuzz()


def told(one: Outcome) -> str:
    """What a run found, in lines for a person."""
    lines = [f"{one.target:18} {one.executions:>9} executions in {one.seconds:4.0f} s, {len(one.findings)} findings"]
    for path in one.findings:
        words = Path(path).with_suffix(".txt")
        lines.append(
            f"  {words.read_text(encoding='utf-8').splitlines()[0]} {path}"
            if words.is_file()
            else f"  {path}\n{one.log}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="+", help='names of targets; "python", "native", "all"; "list" shows them')
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=0, help="the same inputs in the same order; 0: others each time")
    parser.add_argument("--home", type=Path, default=HOME, help="where corpus and findings are (.cache/fuzz)")
    parser.add_argument("--keep", action="store_true", help="write some of the corpus to tests/fuzz/corpus")
    asked = parser.parse_args()
    some = set(asked.targets)
    in_python = python_targets() if some - {"native", *build.SETS} else []
    groups = {"python": in_python, "native": list(build.SETS), "all": [*in_python, *build.SETS]}
    if "list" in some:
        print("\n".join(groups["all"]))
        return 0
    names = [name for asked_for in asked.targets for name in groups.get(asked_for, [asked_for])]
    if unknown := [name for name in names if name not in groups["all"]]:
        parser.error(f"unknown target {unknown[0]!r}; targets: {', '.join(groups['all'])}")
    found = 0
    for name in names:
        one = fuzz(name, asked.seconds, asked.home, asked.seed)
        found += len(one.findings)
        print(told(one), flush=True)
        if asked.keep:
            kept_nbytes = build.KEPT_NBYTES if name in build.SETS else kit.TARGETS[name].kept_nbytes
            inputs = [path.read_bytes() for path in (asked.home / "corpus" / name).iterdir()]
            print(f"  {kit.keep(name, inputs, kept_nbytes)} inputs kept in {kit.CORPUS}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
