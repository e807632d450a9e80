"""A store of tensors where anything fails at any moment: no tensor is lost, the books are right, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faulty_disk import each, failing, failing_allocations, left_since

from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError
from anytorch.memory.spill import Spill
from anytorch.memory.stack import StoreLevel, TensorStore

CPU = torch.device("cpu")
ROOM = 4096
FAULTS: dict[str, Callable[[Path], Any]] = {
    "a full disk": lambda folder: partial(failing, within=folder),
    "a disk that does not read": lambda folder: partial(failing, within=folder, reads=True),
    "no memory": lambda _: failing_allocations,
}


def tensor(number: int) -> torch.Tensor:
    return torch.full((ROOM // 4,), number, dtype=torch.float32)  # as much as the memory holds


def check_books(store: TensorStore, told: str) -> None:
    for level in range(len(store.places)):
        entries = sum(entry.nbytes for entry in store._entries.values() if entry.level == level)
        assert store.ledger.use(str(level)).used == entries, f"{told}: level {level}"
    assert not store._at_work.total() and not any(entry.busy for entry in store._entries.values()), told


@pytest.mark.parametrize("kind", FAULTS)
def test_no_tensor_is_lost(kind: str, tmp_path: Path) -> None:
    disk, told = tmp_path / "disk", 0
    values = {number: tensor(number) for number in range(3)}
    for attempt in each(FAULTS[kind](disk)):
        store = TensorStore([StoreLevel(ROOM, CPU), StoreLevel(2**20, None, disk)])
        before, held = set(threading.enumerate()), set()
        try:
            with attempt:
                for number, value in values.items():  # each sends the one before it to the disk
                    store.put(str(number), value)
                    held.add(number)
                for number in values:  # and these bring it back
                    store.get(str(number))
                store.put("1", values[1])
                store.remove("0")
                held.discard(0)
        except Exception as exc:  # noqa: BLE001
            assert isinstance(exc, AnytorchError) or is_out_of_memory(exc), f"{attempt}: {exc!r}"
            told += 1
        check_books(store, str(attempt))
        for number in held:
            found = store.get(str(number))
            assert found is not None and torch.equal(found, values[number]), f"{attempt}: {number} is lost"
        check_books(store, str(attempt))
        store.close()
        assert not left_since(before), f"{attempt} left a thread"
        if any(disk.rglob("*")):  # what could not be removed goes at the next start
            assert attempt.counter.name in ("unlink", "rmdir", "open"), str(attempt)
            Spill(disk).close()
            assert not any(disk.rglob("*")), str(attempt)
    assert told > 5
