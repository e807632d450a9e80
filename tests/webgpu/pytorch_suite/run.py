"""PyTorch's own device tests on webgpu, each beside its twin on the CPU: `make test-webgpu-pytorch`.

    python -m tests.webgpu.pytorch_suite.run --minutes 60 --jobs 2 --output docs/reference/webgpu-pytorch-tests.json
    python -m tests.webgpu.pytorch_suite.run --minutes 5 test_view_ops nn/test_pooling      # some files
    python -m tests.webgpu.pytorch_suite.run --only test_foo_float32 test_torch               # some tests, with their errors

The sources are Debian's package of PyTorch (`sources`), of the version nearest to the installed torch that can be had. What
fails on the CPU too, for the versions differ, does not count. The minutes are shared between the files; a file that has run
through leaves its time to the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.webgpu.pytorch_suite.sources import REPOSITORY, find
from tests.webgpu.pytorch_suite.verdicts import Summary, read, totals
from tests.webgpu.pytorch_suite.worker import HANGS_S, INTERRUPTED

FILES = (
    "test_view_ops", "test_torch", "test_indexing", "test_reductions", "test_binary_ufuncs", "test_unary_ufuncs",
    "test_shape_ops", "test_tensor_creation_ops", "test_sort_and_select", "test_scatter_gather_ops", "test_type_promotion",
    "test_nn", "nn/test_convolution", "nn/test_pooling", "nn/test_embedding", "nn/test_dropout",
    "nn/test_multihead_attention", "test_native_mha", "test_autograd", "test_linalg", "test_modules", "test_optim",
    "test_foreach", "test_masked",
    "test_transformers", "test_spectral_ops", "test_dlpack", "test_segment_reductions", "test_complex", "test_testing",
)  # fmt: skip
LOGS = REPOSITORY / ".cache" / "pytorch-suite"
MOST_STARTS = 40  # of one file: after so many deaths it is given up
SHORTEST_S = 45.0
LOADING_S = 900.0  # a file of PyTorch's, on a machine that is busy


def environment() -> dict[str, str]:
    lavapipe = REPOSITORY / ".cache" / "mesa" / "lvp.json"
    chosen = dict(os.environ)
    if lavapipe.exists():
        chosen.setdefault("VK_ICD_FILENAMES", str(lavapipe))
    path = os.pathsep.join(filter(None, (str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", ""))))
    chosen.update(
        PYTHONPATH=path,
        ANYTORCH_WEBGPU_FALLBACK="silent",
        ANYTORCH_WEBGPU_CHECKS="now",  # PyTorch's tests want an error where it arises
        OMP_NUM_THREADS="1",
        LP_NUM_THREADS="1",
        PYTORCH_TEST_WITH_SLOW="0",
        PYTORCH_PRINT_REPRO_ON_FAILURE="0",
        XDG_RUNTIME_DIR=chosen.get("XDG_RUNTIME_DIR", "/tmp"),
    )
    return chosen


class File:
    """One test file on its way through its workers."""

    def __init__(self, name: str, source: Path, seconds: float) -> None:
        self.name, self.source, self.seconds, self.before = name, source, seconds, 0.0
        self.log = LOGS / f"{name.replace('/', '+')}.jsonl"
        self.starts = 0
        self.worker: subprocess.Popen[bytes] | None = None
        self.log.touch()
        self.before = self.spent()

    def spent(self) -> float:
        """Seconds in tests, over all runs."""
        entries = [json.loads(each) for each in self.log.read_text("utf-8").splitlines() if each.endswith("}")]
        return float(sum(entry.get("seconds", 0.0) for entry in entries))

    def left(self) -> float:
        return self.seconds - (self.spent() - self.before)

    def start(self, only: str = "") -> None:
        self.starts += 1
        self.overdue = time.time() + self.left() + LOADING_S + HANGS_S
        command = [sys.executable, "-m", "tests.webgpu.pytorch_suite.worker"]
        with self.log.with_suffix(".out").open("ab") as said:
            output = None if only else said
            self.worker = subprocess.Popen(
                [*command, str(self.source), str(self.left()), str(self.log), *([only] if only else [])],
                env=environment(),
                cwd=LOGS,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def going_on(self) -> bool:
        """Look after the worker: is there more to do?"""
        if self.worker is None:
            self.start()
            return True
        status = self.worker.poll()
        if status is None:
            if time.time() > self.overdue:
                self.worker.kill()
            return True
        if status == 0:
            return False
        if status != INTERRUPTED:
            lines = self.log.read_text("utf-8").splitlines()
            if not any('"key"' in line for line in lines[-1:]):
                print(f"{self.name} cannot be loaded: see {self.log.with_suffix('.out')}", flush=True)
                return False
            with self.log.open("a", encoding="utf-8") as log:
                log.write(json.dumps({"died": status}) + "\n")
        if self.left() < 20 or self.starts >= MOST_STARTS:
            return False
        self.start()
        return True


def drive(files: list[tuple[str, Path]], seconds: float, jobs: int) -> None:
    end = time.time() + seconds
    waiting = list(files)
    running: list[File] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            name, source = waiting.pop(0)
            share = (end - time.time()) * jobs / (len(waiting) + len(running) + 1)
            running.append(File(name, source, max(SHORTEST_S, share)))
        for one in list(running):
            if not one.going_on():
                running.remove(one)
                print(line(read(one.log)), flush=True)
        time.sleep(0.5)


def line(one: Summary) -> str:
    share = f"{100 * one.both / one.counted:.1f} %" if one.counted else "–"
    counts = {"CPU": one.cpu, "both": one.both, "failed": one.failed, "wrong": one.wrong, "aborted": one.aborted}
    counts |= {"by design": one.by_design, "skipped": one.skipped, "late": one.late}
    told = "  ".join(f"{name} {count:4}" for name, count in counts.items())
    return f"{one.file:28} ran {one.run:5} of {one.collected:6}  {share:>7}  {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="a regular expression: these tests, with what they say")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--again", action="store_true", help="forget earlier results; else they are gone on from")
    chosen = parser.parse_args()
    import torch

    tests = find(torch.__version__)
    files = [(name, tests / f"{name}.py") for name in chosen.files or FILES]
    LOGS.mkdir(parents=True, exist_ok=True)
    if chosen.only:
        for name, source in files:
            one = File(name, source, 3600)
            one.log = LOGS / "only.jsonl"
            one.log.write_text("", "utf-8")
            one.start(chosen.only)
            assert one.worker is not None
            one.worker.wait()
        return 0
    if chosen.again:
        for name, _ in files:
            (LOGS / f"{name.replace('/', '+')}.jsonl").unlink(missing_ok=True)
    drive([(name, source) for name, source in files if source.exists()], 60 * chosen.minutes, chosen.jobs)
    summaries = [read(path) for path in sorted(LOGS.glob("*.jsonl")) if path.stem != "only"]
    whole = totals(summaries)
    print(json.dumps(whole))
    if chosen.output:
        report = {
            "torch": torch.__version__,
            "sources": tests.parent.name,
            "adapter": _adapter(),
            "minutes": chosen.minutes,
            "commit": _commit(),
            "totals": whole,
            "files": [asdict(one) for one in summaries],
        }
        chosen.output.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", "utf-8")
    return 1 if whole["wrong"] or whole["aborted"] else 0


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _adapter() -> str:
    text = "import anytorch.webgpu, torch; print(torch.webgpu.get_device_name())"
    done = subprocess.run([sys.executable, "-c", text], env=environment(), capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
