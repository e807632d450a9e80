"""Out of memory becomes a smaller batch or a streaming model, and the caller is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import anytorch
from anytorch.errors import OutOfMemory
from anytorch.memory import rescue
from anytorch.memory.rescue import with_rescue


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 4 MB: budgets are shares of its memory."""
    from anytorch.devices.types import MemoryUse

    monkeypatch.setattr(rescue, "memory", lambda device: MemoryUse(total=4 * 2**20, free=2**20))


def test_nothing_to_rescue(models: Any) -> None:
    found = with_rescue(lambda batch: batch * 2, models.made(), batch=8, device="cpu")
    assert (found.result, found.batch, found.steps) == (16, 8, ())


def test_a_smaller_batch_is_tried_first(models: Any) -> None:
    def run(batch: int) -> int:
        if batch > 2:
            raise torch.OutOfMemoryError("the device is full")
        return batch

    model = models.made()
    found = with_rescue(run, model, batch=8, device="cpu")
    assert found.batch == 2 and len(found.steps) == 2 and "halved to 2" in found.steps[-1]
    with pytest.raises(anytorch.AnytorchError, match="not fitted"):
        anytorch.memory.fitted(model)


def test_then_the_weights_stream(models: Any, disk: Path) -> None:
    model = models.made()
    expected = model(models.IDS)

    def run(batch: int) -> torch.Tensor:
        """Fails until the weights take less than a quarter of the device."""
        handle = model.__dict__.get("_anytorch_fitted")
        if handle is None or handle.plan.device_nbytes > 1.5 * 2**20:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        with torch.no_grad():
            return model(models.IDS)

    found = with_rescue(run, model, batch=2, device="cpu", disk=disk)
    assert torch.equal(found.result, expected)
    assert found.batch == 1 and any("stream per pass" in step for step in found.steps)
    anytorch.memory.unfit(model)


def test_what_was_tried_is_in_the_error(models: Any) -> None:
    def run(batch: int) -> int:
        raise torch.OutOfMemoryError("the device is full")

    with pytest.raises(OutOfMemory, match="halved to 1") as caught:
        with_rescue(run, models.made(), batch=2, device="cpu", stream=False)
    assert "stream=True" in caught.value.hint


def test_other_errors_pass_through(models: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with_rescue(lambda batch: batch // 0, models.made(), batch=2, device="cpu")
