"""Random numbers by our C++: torch's own, bit for bit, and torch itself where there is no compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from anytorch import native
from anytorch.errors import CompilerMissing
from anytorch.forecast.decoding import sampling as uniform


@pytest.fixture(scope="module")
def library(missing: Callable[[str, str], NoReturn]) -> Any:
    source = uniform.UniformLibrary()
    source.builder.join()
    if source.library is None:
        missing("compiler", "the native library could not be built")
    return source.library


@pytest.mark.parametrize("before", [0, 1, 2, 621, 622, 623, 624])
def test_numbers_and_state_are_torchs(library: Any, before: int) -> None:
    """From every kind of place: at the beginning and the end of a state, and with a number's two words in two of them."""
    ours, theirs = (torch.Generator().manual_seed(2**40 + 7) for _ in range(2))
    for generator in (ours, theirs):
        torch.rand(before, generator=generator)  # a word each
    for count in (0, 1, 2, 311, 312, 313, 5000):
        found, wanted = torch.empty(2, count, dtype=torch.float64)
        uniform.fill_by(library, found, ours)
        wanted.uniform_(generator=theirs)
        assert torch.equal(found, wanted) and torch.equal(ours.get_state(), theirs.get_state())


def test_normal_numbers_that_wait_are_kept(library: Any) -> None:
    """torch draws normal numbers in pairs, and the second one waits in the state."""
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (ours, theirs):
        torch.randn(1, generator=generator)
    uniform.fill_by(library, torch.empty(9, dtype=torch.float64), ours)
    torch.empty(9, dtype=torch.float64).uniform_(generator=theirs)
    assert torch.equal(torch.randn(3, generator=ours), torch.randn(3, generator=theirs))


def test_another_generator_is_noticed(library: Any) -> None:
    class Wrong:
        def uniform(self, state: Any, place: Any, out: Any, count: int) -> None:
            """Leaves everything as it is."""

    assert uniform.draws_the_same(library)
    assert not uniform.draws_the_same(Wrong())


def test_without_a_compiler_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*given: Any, **options: Any) -> Any:
        raise CompilerMissing("no C++ compiler")

    monkeypatch.setattr(native, "load", missing)
    uniform.library_for.cache_clear()
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    found, wanted = torch.empty(2, 100, dtype=torch.float64)
    for _ in range(2):
        uniform.fill(found, ours)
        wanted.uniform_(generator=theirs)
        assert torch.equal(found, wanted)
        (kept,) = [uniform.library_for(uniform.settings.cache_folder())]
        kept.builder.join()
        assert kept.library is None
    uniform.library_for.cache_clear()
