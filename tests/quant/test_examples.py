"""The worked examples recover what rounding and pruning cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def numbers(run_python: Callable[..., Any], name: str) -> dict[str, float]:
    if find_spec("sklearn") is None:  # not imported here: that changes environment variables
        pytest.skip("scikit-learn is not installed")
    done = run_python(f"import {name}, json; print(json.dumps({name}.main()))", path=[EXAMPLES])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
def test_training_with_rounding_recovers_the_accuracy(run_python: Callable[..., Any]) -> None:
    found = numbers(run_python, "qat")
    assert found["rounded afterwards"] < found["float32"] - 0.03
    assert found["trained with rounding"] > found["float32"] - 0.015
    assert found["saved and loaded"] == found["trained with rounding"]


@pytest.mark.slow
def test_training_on_recovers_what_pruning_cost(run_python: Callable[..., Any]) -> None:
    found = numbers(run_python, "prune")
    assert found["a fifth of the weights"] < found["all weights"] - 0.1
    assert found["…trained on"] > found["all weights"] - 0.02
    assert found["its share of zeros"] == pytest.approx(0.8, abs=0.01)
    assert found["half of the neurons"] < found["all weights"] - 0.1
    assert found["…trained on, too"] > found["all weights"] - 0.02
    assert found["its share of parameters"] < 0.4
