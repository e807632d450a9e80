"""The profiler counts ops where they run, adds up to the whole, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anytorch import lite
from anytorch.errors import UsageError
from anytorch.lite import functional as F
from anytorch.lite.autograd import Node
from anytorch.lite.ops import elementwise
from anytorch.lite.tensors import CustomTensor


def train_once() -> float:
    lite.seed(0)
    model, x = lite.CustomLinear(32, 16), lite.randn(8, 32)
    loss = F.mse_loss(F.relu(model(x)) + 1.0, lite.zeros(8, 16))
    loss.backward()
    return float(loss.item())


def test_every_op_is_counted_with_its_time_and_memory(tmp_path: Path) -> None:
    want = train_once()
    before = elementwise.relu, vars(CustomTensor)["__add__"], Node.gradients, F.relu
    with lite.profile() as found:
        assert train_once() == want
    assert (elementwise.relu, vars(CustomTensor)["__add__"], Node.gradients, F.relu) == before
    rows = {row.name: row for row in found.rows()}
    assert rows["linear"].calls == rows["relu"].calls == rows["mse_loss"].calls == 1
    assert rows["linear"].nbytes == 8 * 16 * 4
    assert {"linear backward", "relu backward"} <= set(rows)
    for event in found.events:
        assert 0 <= event.self_ns <= event.total_ns
    whole_ns = max(one.start_ns + one.total_ns for one in found.events) - found.events[0].start_ns
    assert sum(one.self_ns for one in found.events) <= whole_ns  # nothing is counted twice
    trace = json.loads(found.chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(trace) == len(found.events) and all(one["ph"] == "X" and one["dur"] >= 0 for one in trace)
    assert "linear" in found.table()


def test_ops_within_ops_are_not_counted_twice_and_errors_end_the_block() -> None:
    with lite.profile() as found, pytest.raises(UsageError), lite.no_grad():
        lite.randn(3, 4) @ lite.randn(5, 6)
    assert [(row.name, row.calls) for row in found.rows() if row.name != "randn"] == [("matmul", 1)]
    with lite.profile(), pytest.raises(UsageError, match="running already"), lite.profile():
        pass
    with lite.profile() as again:
        lite.ones(2).exp()
    assert [row.name for row in again.rows()] == ["exp"]


def test_the_decorator_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert lite.profiled(train_once)() == train_once()
    said = capsys.readouterr().err
    assert said.startswith("train_once\n") and "linear" in said
