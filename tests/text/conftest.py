"""The folder of the default model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_folder(minilm: Path) -> Path:
    return minilm
