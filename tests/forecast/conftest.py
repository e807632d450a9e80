"""The golden cases of the published code, the two small random-weight checkpoints they were made with, and inputs."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

COMMITTED = Path(__file__).parents[1] / "fixtures" / "kronos"
SHARED = Path(__file__).parents[3] / "shared" / "golden" / "kronos"


class Golden:
    """`golden.case(name)` → arrays, `golden.info(name)` → parameters, `golden.model("a")`, `golden.tokenizer("a")`."""

    def __init__(self) -> None:
        self.root = SHARED if (SHARED / "index.json").is_file() else COMMITTED
        self.index = json.loads((self.root / "index.json").read_text())

    def names(self, kind: str) -> list[str]:
        return [case["name"] for case in self.index["cases"] if case["kind"] == kind]

    def info(self, name: str) -> dict[str, Any]:
        (found,) = [case for case in self.index["cases"] if case["name"] == name]
        return found

    def case(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.root / "cases" / f"{name}.npz") as arrays:
            return dict(arrays)

    def folder(self, config: str, part: str) -> Path:
        return self.root / f"config_{config}" / part

    @lru_cache(maxsize=8)  # noqa: B019  (one per session)
    def model(self, config: str) -> Any:
        from anytorch.forecast.model import Kronos

        return Kronos.from_pretrained(self.folder(config, "model"))

    @lru_cache(maxsize=8)  # noqa: B019
    def tokenizer(self, config: str) -> Any:
        from anytorch.forecast.model import KronosTokenizer

        return KronosTokenizer.from_pretrained(self.folder(config, "tokenizer"))


GOLDEN = Golden()


@pytest.fixture(scope="session")
def golden() -> Golden:
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
    from anytorch.forecast import KronosPredictor

    def make(config: str = "a", **options: Any) -> KronosPredictor:
        return KronosPredictor(golden.model(config), golden.tokenizer(config), device="cpu", **options)

    return make
