"""The folder of the default model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(minilm: Path) -> Path:
    return minilm


@pytest.fixture(autouse=True)
def time_to_measure(isolation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, everything is measured."""
    monkeypatch.setenv("ANYTORCH_MEASURE_S", "60")
