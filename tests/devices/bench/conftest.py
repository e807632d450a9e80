"""Small buffers and one thread: these tests check what is measured, not how fast it is, and share their cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from anytorch.devices.bench import workloads


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(workloads, "LEAST_NBYTES", 2**20)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
