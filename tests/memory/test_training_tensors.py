"""A block's gradients and states keep the room they have while others take what is free."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import BudgetTooSmall
from anytorch.memory.block_updates import BlockTensors
from anytorch.memory.ledger import Ledger
from anytorch.memory.training import TieredOptimizer
from anytorch.memory.types import Speeds


def test_a_block_that_is_put_back_keeps_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks for room at every moment at which the ledger could give it."""
    ledger = Ledger({"host": 1000, "disk": 0})
    fitted: Any = SimpleNamespace(ledger=ledger, memory_level="host")
    tensors = BlockTensors(fitted, "states")
    tensors.put("a block", {"weight": torch.zeros(100)})
    refused = []

    def then_another_asks(real: Any) -> Any:
        def ask(*given: Any) -> Any:
            found = real(*given)
            with pytest.raises(BudgetTooSmall):
                reserve("host", "gradients of another", 700)
            refused.append(given)
            return found

        return ask

    reserve = ledger.reserve
    for name in ("reserve", "release", "resize"):
        monkeypatch.setattr(ledger, name, then_another_asks(getattr(ledger, name)))
    tensors.put("a block", {"weight": torch.ones(150)})
    assert refused and torch.equal(tensors.take("a block")["weight"], torch.ones(150))
    assert ledger.holders("host") == {"states of a block": 600}


def test_what_does_not_fit_leaves_the_reservation_as_it_was() -> None:
    ledger = Ledger({"host": 1000})
    ledger.resize("host", "one", 400)
    ledger.reserve("host", "other", 500)
    with pytest.raises(
        BudgetTooSmall, match="one needs 600 bytes at level host, where 500 bytes of 1000 bytes are used"
    ):
        ledger.resize("host", "one", 600)
    assert ledger.holders("host") == {"one": 400, "other": 500}
    ledger.resize("host", "one", 500)
    assert (ledger.free("host"), ledger.use("host").peak) == (0, 1000)
    ledger.resize("host", "one", 100)
    assert (ledger.free("host"), ledger.use("host").peak) == (400, 1000)


def test_old_versions_on_disk_are_not_kept_open(disk: Path) -> None:
    """A removed file that is open keeps its space: a long run would fill the disk with versions nobody sees."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    anytorch.memory.fit(model, "cpu", device_budget="2MB", reserve="1100KB", disk=disk, speeds=Speeds(10.0, 2.0))
    handle = anytorch.memory.fitted(model)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, lr=1e-2)
    for _ in range(4):
        model(torch.ones(2, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(list(disk.rglob("*.safetensors"))) > 8, "weights and states are there"
    assert [path for path, _ in handle.reader._files if not Path(path).exists()] == []
    handle.close()
