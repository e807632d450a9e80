"""The two programs of the guide do what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # scikit-learn sets them when it is imported
        monkeypatch.setenv(variable, "TRUE")
    accuracy, quantized = load("lite_digits").main(epochs=5)
    assert accuracy > 0.97
    assert quantized > 0.96
    assert (tmp_path / "digits.safetensors").stat().st_size > 20_000


@pytest.mark.slow
def test_characters() -> None:
    loss, written = load("lite_characters").main(steps=120)
    assert loss < 0.5
    assert written.startswith("this is the ")
    assert "that" in written[12:]
