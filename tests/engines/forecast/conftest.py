"""The golden cases, from the tests of the model, and inputs to forecast."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest


def _golden() -> Any:
    path = Path(__file__).parents[2] / "models" / "kronos" / "conftest.py"
    name = "anytorch_tests_kronos_golden"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.Golden()


GOLDEN = _golden()


@pytest.fixture(scope="session")
def golden() -> Any:
    return GOLDEN


@pytest.fixture(scope="session")
def minutes() -> pd.DataFrame:
    return read("minutes")


def read(name: str) -> pd.DataFrame:
    frame = pd.read_csv(GOLDEN.root / "inputs" / f"{name}.csv")
    column = frame.columns[0]
    frame[column] = pd.to_datetime(frame[column])
    return frame.rename(columns={column: "timestamps"})


@pytest.fixture(scope="session")
def inputs() -> Any:
    """`inputs(name)` → the frame of one synthetic input, with `timestamps`."""
    return read


@pytest.fixture
def predictor(golden: Any) -> Any:
    """`predictor("a", max_context=64)`."""
    from anytorch.engines.forecast import KronosPredictor

    def make(config: str = "a", **options: Any) -> KronosPredictor:
        return KronosPredictor(golden.model(config), golden.tokenizer(config), device="cpu", **options)

    return make
