"""Without the extra "forecast", every door to forecasts says how to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCES = Path(__file__).parents[2] / "src"
# What a plain `pip install .` looks like: these cannot be found.
BARE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
ALL = ("numpy", "pandas", "torch", "safetensors", "matplotlib", "pyarrow")


def without(missing: tuple[str, ...], program: str) -> Any:
    return subprocess.run(
        [sys.executable, "-c", BARE.format(missing=missing) + program],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("missing", [ALL, ("torch",)])
@pytest.mark.parametrize(
    "arguments", [["forecast", "--sample"], ["finetune", "predictor", "--sample", "--output", "x"]]
)
def test_the_command_line_names_the_extra(missing: tuple[str, ...], arguments: list[str]) -> None:
    told = without(missing, f"from anytorch.cli.main import main; sys.exit(main({arguments!r}))")
    assert told.returncode == 1 and "[forecast]'" in told.stderr, told.stderr
    assert "bug" not in told.stderr and "Traceback" not in told.stderr and " need" in told.stderr


def test_a_question_about_forecasts_is_no_forecast(tmp_path: Path) -> None:
    """The command decides which extra is named, and no word behind it."""
    (tmp_path / "texts.txt").write_text("one\n")
    arguments = ["embed", str(tmp_path / "texts.txt"), "--search", "forecast"]
    told = without(ALL, f"from anytorch.cli.main import main; sys.exit(main({arguments!r}))")
    assert told.returncode == 1 and "embeddings need numpy" in told.stderr and "[embed]'" in told.stderr, told.stderr
    assert "forecasts" not in told.stderr and "bug" not in told.stderr


@pytest.mark.parametrize(
    "call", ["load_predictor", "sample_candles(5)", "read_candles('x.csv')", "Kronos", "finetune_predictor"]
)
def test_python_names_the_extra(call: str) -> None:
    told = without(ALL, f"import anytorch; anytorch.{call}")
    assert "anytorch.errors.PackageMissing" in told.stderr.splitlines()[-2] and "[forecast]'" in told.stderr


def test_another_broken_import_is_not_hidden(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'pytz'", name="pytz")

    monkeypatch.setattr("anytorch.cli.commands.forecast.run", broken)
    told = cli("forecast", "--sample")
    assert told.status == 70 and "No module named 'pytz'" in told.err
