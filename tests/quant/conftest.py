"""One cache folder for all tests of this package: the C++ kernels are compiled once, not once per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anytorch.measured import store
from anytorch.quant import choose

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def shared_builds(isolation: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder outlives the run, as a user's does; the measured kernels in it do not reach a test."""
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(REPOSITORY / ".cache" / "quant"))
    monkeypatch.setenv("ANYTORCH_MEASURE_S", "60")  # on a busy machine, too, everything is measured
    monkeypatch.setattr(store, "folder", lambda: tmp_path / "measured")
    # Tests ask whether kernels are right, not which is fastest: one round is enough.
    monkeypatch.setattr(choose, "ROUNDS", 1)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
