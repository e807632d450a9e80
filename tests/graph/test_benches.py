"""The benches of kernel graphs refuse numbers for what is wrong, and end with a failure then."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """The script named by the test, and its output in a folder of its own."""
    monkeypatch.syspath_prepend(str(BENCH))
    name = request.param
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def run(bench: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    monkeypatch.setattr(sys, "argv", [bench.__file__, *arguments])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    return ended.value.code


@pytest.mark.parametrize("bench", ["compile"], indirect=True)
@pytest.mark.parametrize("kind", ["output", "gradient", "no gradient"])
def test_a_compiled_model_that_is_wrong_has_no_time(
    bench: Any, monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    class Wrong(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.model(x)
            if kind == "output":
                return made * 1.01
            for parameter in self.model.parameters():
                parameter.requires_grad_(kind != "no gradient")
            return made + (made - made.detach()) if kind == "gradient" else made.detach() + x.requires_grad_().sum() * 0

    made = torch.compile
    monkeypatch.setattr(bench, "MODELS", {"small": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), (2, 4))})
    monkeypatch.setattr(bench, "BACK_ENDS", {"anytorch": "eager"})
    monkeypatch.setattr(torch, "compile", lambda model, **options: Wrong(made(model, backend="eager")))
    code = run(bench, monkeypatch, "--way", "training", "--rounds", "1", "--output", str(tmp_path / "r.json"))
    assert "anytorch is wrong" in str(code) and not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("bench", ["graphs"], indirect=True)
@pytest.mark.parametrize("kind", ["answer", "floor"])
def test_a_graph_that_is_wrong_or_impossibly_fast_has_no_time(
    bench: Any, monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    honest = bench.ours

    def ours(*args: Any) -> Any:
        graph, took = honest(*args)
        return (lambda *tensors: [one * 1.01 for one in graph(*tensors)]) if kind == "answer" else graph, took

    monkeypatch.setattr(bench, "ours", ours)
    monkeypatch.setattr(bench, "limits", lambda *args: (1.0, 1.0))
    monkeypatch.setattr(bench, "rates_for", lambda *args: (1.0, 1.0))  # bytes in a second
    arguments = ("--small", "--eager", "--only", "nTrans", "--batches", "1", "--time-limit", "1")
    code = run(bench, monkeypatch, *arguments, "--output", str(tmp_path / "r.json"))
    assert "no numbers for 1 rows" in str(code) and not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("bench", ["cpu_limits"], indirect=True)
def test_what_cores_can_do_is_no_less_than_what_torch_does(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a busy machine can say: each is a positive number, and the numbers were read (it checks their sum)."""
    monkeypatch.setattr(bench, "AT_LEAST_S", 1e-4)
    assert bench.bytes_per_s(1 << 16) > 0 and bench.bytes_per_s(3_000_001) > 0 and bench.operations_per_s() > 0
