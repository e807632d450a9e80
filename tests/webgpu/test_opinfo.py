"""A part of PyTorch's operator suite each day; `make test-webgpu-full` runs all of it (tests/webgpu/opinfo.py)."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.webgpu import opinfo, opinfo_examiner

ROOT = Path(__file__).parents[2]
PARTS = 30  # about 100 of some 3,000 entries and dtypes a day
SECONDS = 45.0


def rotation() -> int:
    """ANYTORCH_TEST_ROTATION repeats a day's part."""
    return int(os.environ.get("ANYTORCH_TEST_ROTATION", datetime.date.today().toordinal()))


@pytest.mark.long
def test_the_days_part_of_the_operator_suite_agrees_with_the_cpu(webgpu: Any, tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    part, answers = rotation() % PARTS, tmp_path / "verdicts.json"
    command = [
        sys.executable,
        "-m",
        "tests.webgpu.opinfo",
        "--rotation",
        str(part),
        "--of",
        str(PARTS),
        "--seconds",
        str(SECONDS),
    ]
    done = subprocess.run(
        [*command, "--output", str(answers)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert answers.exists(), f"the sweep ended with status {done.returncode}\n{done.stderr}"
    found = json.loads(answers.read_text("utf-8"))
    agree = sum(counts.get("agree", 0) for counts in found["totals"].values())
    assert agree >= 20, f"too few entries to mean anything\n{done.stdout}\n{done.stderr}"
    lines = [f"{t['status']} {t['op']} {t['dtype']}: {t['reason']}" for t in found["troubles"]]
    assert not lines, "\n".join([f"ANYTORCH_TEST_ROTATION={part} repeats this part", *lines])


def test_a_rotation_covers_the_whole_sweep_once() -> None:
    tasks = [(f"op{i}", dtype) for i in range(40) for dtype in opinfo.DTYPES]
    parts = [opinfo.chosen(tasks, part, 7) for part in range(7)]
    assert sorted(task for part in parts for task in part) == sorted(tasks)
    assert all(parts), "a part is empty"
    assert opinfo.chosen(tasks, 7 + 3, 7) == parts[3], "the eighth day repeats the first"


class Sayings:
    """A worker's answers, recorded instead of computed: what matters here is how the parent takes them."""

    def __init__(self, script: str) -> None:
        self.worker = opinfo.Worker()
        self.worker.errors = open(os.devnull, "r+")  # noqa: SIM115, PTH123
        self.worker.process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


def test_a_crash_costs_one_entry() -> None:
    died = Sayings("import os, signal; input(); os.kill(os.getpid(), signal.SIGSEGV)")
    verdict = died.worker.do("add", "float32", False, 20.0)
    assert (verdict.status, verdict.reason) == ("error", "the process died of SIGSEGV")
    assert died.worker.process is None, "the next task starts a new one"


def test_a_hanging_op_is_ended() -> None:
    hung = Sayings("import time; input(); time.sleep(100)")
    verdict = hung.worker.do("add", "float32", False, 0.5)
    assert (verdict.status, verdict.reason) == ("error", "no answer in time")


@pytest.fixture(scope="module")
def examiner(webgpu: Any) -> Any:
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    return opinfo_examiner.Examiner()


def test_the_sweep_sees_a_wrong_answer(examiner: Any, webgpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = webgpu
    right = examiner.entries["add"].op

    def wrong(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(value, *args, **kwargs)
        return result + 0.01 if value.device.type == "webgpu" else result

    monkeypatch.setattr(examiner.entries["add"], "op", wrong)
    verdict = examiner.examine("add", "float32")
    assert verdict.status == "wrong", verdict
    assert "mismatched" in verdict.reason.lower() or "scalars" in verdict.reason.lower(), verdict.reason

    def shapeless(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(value, *args, **kwargs)
        return result[None] if value.device.type == "webgpu" else result

    monkeypatch.setattr(examiner.entries["add"], "op", shapeless)
    assert examiner.examine("add", "int64").status == "wrong"

    def raising(value: Any, *args: Any, **kwargs: Any) -> Any:
        if value.device.type == "webgpu":
            raise ValueError("not today")
        return right(value, *args, **kwargs)

    monkeypatch.setattr(examiner.entries["add"], "op", raising)
    verdict = examiner.examine("add", "float32")
    assert verdict.status == "error" and "ValueError: not today" in verdict.reason

    def wrong_gradient(value: Any, *args: Any, **kwargs: Any) -> Any:
        if value.device.type == "webgpu" and value.requires_grad:
            value = value * 1.5 - value.detach() * 0.5
        return right(value, *args, **kwargs)

    monkeypatch.setattr(examiner.entries["add"], "op", wrong_gradient)
    verdict = examiner.examine("add", "float32")
    assert verdict.status == "wrong" and "gradient" in verdict.reason, verdict
    assert torch.webgpu.is_initialized()


def test_a_summary_names_every_trouble(tmp_path: Path) -> None:
    found = [
        opinfo.Verdict("sub", "int64", "wrong", "result 0: 3 instead of 4", samples=4, compared=3),
        opinfo.Verdict("add", "int64", "agree", samples=4, compared=4),
        opinfo.Verdict("add", "float32", "agree", samples=4, compared=4, fallbacks=["aten.add.Tensor"]),
    ]
    opinfo.write(tmp_path / "summary.json", found)
    stored = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    assert stored["troubles"] == [
        {"op": "sub", "dtype": "int64", "status": "wrong", "reason": "result 0: 3 instead of 4"}
    ]
    int64 = {name: count for name, count in stored["totals"]["int64"].items() if count}
    assert int64 == {"agree": 1, "without the CPU": 1, "wrong": 1}
    assert stored["entries"]["add"] == {"agree": ["float32", "int64"], "fallbacks": ["aten.add.Tensor"]}
    assert list(stored["entries"]) == ["add", "sub"]
