"""What tests of searches share: few candidates, as compilers are slow, and a choice that does not depend on the clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from anytorch.graph import backs, handwritten, search
from anytorch.graph.backs import Back
from anytorch.measured.verdict import Trial


@pytest.fixture(autouse=True)
def compiled_once(shared_libraries: object) -> None:
    """A kernel that several tests compile is compiled by the first of them."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One schedule for every kernel and none by hand; a program of ours is chosen wherever it is right, fast or not."""
    monkeypatch.setattr(handwritten, "MODULES", {})
    monkeypatch.setattr(handwritten, "_registered", {})
    plain = backs.back_of

    def fewer(device: torch.device) -> tuple[Back | None, str]:
        back, why = plain(device)
        assert back is not None, why
        return replace(back, candidates=lambda kernel, known, most: back.candidates(kernel, known, 1)), ""

    def ours(trials: Sequence[Trial], *, noise: float = 0.0) -> tuple[str, str]:
        timed = [one.name for one in trials if one.seconds is not None]
        return next((name for name in timed if name != search.EAGER), search.EAGER), "a test wants it"

    monkeypatch.setattr(search, "back_of", fewer)
    monkeypatch.setattr(search, "fastest", ours)
    monkeypatch.setattr(search, "HOPELESS", math.inf)
