"""Work that gives the same bits again: what is asked of torch, and that it is put back."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils import deterministic

from anytorch.devices.repeat import repeatable

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> tuple[bool, bool, bool, str | None]:
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return (*asked, deterministic.fill_uninitialized_memory, os.environ.get(VARIABLE))


@pytest.mark.parametrize("fails", [False, True])
def test_an_accelerator_is_asked_for_order_and_then_left_as_it_was(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = settings()
    try:
        with repeatable(torch.device("cuda", 0)):
            assert settings() == (True, False, False, ":4096:8")
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert settings() == before


def test_what_the_user_has_set_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, ":16:8")
    with repeatable(torch.device("cuda", 0)):
        assert settings()[3] == ":16:8"
    assert settings()[3] == ":16:8"


def test_a_cpu_needs_nothing() -> None:
    before = settings()
    with repeatable(torch.device("cpu")):
        assert settings() == before
