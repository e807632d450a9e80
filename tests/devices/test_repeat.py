"""Work that gives the same bits again: what is asked of torch, and that it is put back."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils import deterministic

from anytorch.devices.seeds import prepare_to_repeat, repeatable

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> tuple[bool, bool, bool]:
    asked = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return (*asked, deterministic.fill_uninitialized_memory)


@pytest.mark.parametrize("fails", [False, True])
def test_an_accelerator_is_asked_for_order_and_then_left_as_it_was(fails: bool) -> None:
    before = settings()
    try:
        with repeatable(torch.device("cuda", 0)):
            assert settings() == (True, False, False)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert settings() == before


def test_a_library_finds_what_it_looks_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS' setting is read with the first product of a process; what the user has set counts more."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    prepare_to_repeat(torch.device("cpu"))
    assert VARIABLE not in os.environ
    prepare_to_repeat(torch.device("cuda", 0))
    assert os.environ[VARIABLE] == ":4096:8"
    monkeypatch.setenv(VARIABLE, ":16:8")
    prepare_to_repeat(torch.device("cuda", 0))
    assert os.environ[VARIABLE] == ":16:8"


def test_a_cpu_needs_nothing() -> None:
    before = settings()
    with repeatable(torch.device("cpu")):
        assert settings() == before
