"""The comparison with the CPU, and bench/backends.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.devices.bench.rows import FAST, ROWS, device, report

from anytorch.devices.bench import relative_to_cpu
from anytorch.devices.bench.results import from_json

pytest.importorskip("torch")


def test_importing_measures_and_loads_nothing(run_python: Callable[..., Any]) -> None:
    heavy = "{'torch', 'numpy', 'matplotlib', 'tomli_w'}"
    code = f"import anytorch.devices.bench, anytorch.devices.tune, sys; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"


def test_ratios_to_the_cpu() -> None:
    ratios = relative_to_cpu(report(device("cpu", ROWS), device("cuda:0", FAST)))["cuda:0"]
    assert ratios["matmul float32"] == pytest.approx(250)
    assert ratios["matmul bfloat16"] == pytest.approx(3500)
    assert ratios["bandwidth copy"] == pytest.approx(80)
    assert ratios["transformer bfloat16"] == pytest.approx(50)
    assert relative_to_cpu(report(device("cuda:0", FAST))) == {}


def script() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "bench" / "backends.py"
    spec = importlib.util.spec_from_file_location("bench_backends", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def test_the_script_prints_ratios_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main(["--duration", "0.05", "--devices", "cpu", "--output", str(tmp_path / "r.json")]) == 0
    out = capsys.readouterr().out
    assert "matmul" in out and "only the CPU" in out
    written = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert from_json(written["report"]).devices[0].id == "cpu"
    text = script().text(report(device("cpu", ROWS), device("cuda:0", FAST)))
    assert "claimed: 10 to 50 times" in text and "250.0 ×" in text


def test_the_script_says_what_is_wrong_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert script().main(["--devices", "qpu"]) == 2
    assert "unknown device 'qpu'" in capsys.readouterr().err
