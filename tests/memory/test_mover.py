"""The mover's lock guards its books, not the disk: a slow read stops only those who need what it reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import ModelError
from anytorch.memory.images import views_of
from anytorch.memory.mover import Mover
from anytorch.memory.reader import File

WIDTH = 512
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
SOON_S = 50.0  # far more than a lock takes, less than the gate's patience


class Gate:
    """Reads wait before it while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Semaphore(0)
        self.failure: Exception | None = None

    def pass_through(self) -> None:
        if not self.open.is_set():
            self.waiting.release()
            assert self.open.wait(60)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made, real = Gate(), File.read

    def read(self: File, *args: Any) -> None:
        made.pass_through()
        real(self, *args)

    monkeypatch.setattr(File, "read", read)
    yield made
    made.open.set()


@pytest.fixture
def started(disk: Path) -> Iterator[tuple[nn.Sequential, Mover]]:
    """Six layers on disk and a ring that holds two of them. Nothing is in it, or on its way to it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model.expected = {str(n): layer.weight.detach().clone() for n, layer in enumerate(model)}  # type: ignore[assignment]
    anytorch.memory.fit(model, "cpu", device_budget=int(2.2 * LAYER), disk=disk)
    handle = anytorch.memory.fitted(model)
    assert set(handle.plan.homes.values()) == {"disk"}
    yield model, handle.mover
    handle.close()


def soon(work: Callable[[], Any]) -> Any:
    """What `work` returns in a thread of its own; fails where it does not come back."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive(), "it waited for a read that it does not need"
    return found[0]


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as exc:  # noqa: BLE001  (looked at by the test)
            found.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def weight(model: Any, mover: Mover, step: str, buffers: dict[str, torch.Tensor]) -> bool:
    views = views_of(mover.images[step], buffers[step])
    return torch.equal(views[f"{step}.weight"], model.expected[step])


def test_a_slow_read_blocks_nobody_who_needs_only_the_lock(started: Any, gate: Gate) -> None:
    model, mover = started
    held = mover.acquire("0")
    gate.open.clear()
    thread, found = beside(lambda: mover.acquire("3"))
    assert gate.waiting.acquire(timeout=SOON_S)
    soon(lambda: mover.wait_unchanged("5"))
    assert soon(lambda: mover.ring_offset(held["0"])) == ("0", 0)
    again = soon(lambda: mover.acquire("0"))  # in the ring already, and used by two now
    assert again["0"].data_ptr() == held["0"].data_ptr() and weight(model, mover, "0", again)
    soon(lambda: mover.release("0"))
    soon(lambda: mover.begin_change("5") or mover.end_change("5"))
    assert thread.is_alive() and not found
    gate.open.set()
    thread.join(SOON_S)
    assert weight(model, mover, "3", found[0])
    mover.release("3")
    mover.release("0")


def test_two_who_need_the_same_block_read_it_once(started: Any, gate: Gate) -> None:
    model, mover = started
    gate.open.clear()
    waiting = [beside(lambda: mover.acquire("2")) for _ in range(2)]
    assert gate.waiting.acquire(timeout=SOON_S)
    gate.open.set()
    for thread, found in waiting:
        thread.join(SOON_S)
        assert weight(model, mover, "2", found[0])
    assert mover.stats.fetched <= 2 and mover._held["2"].users == 2  # itself, and the next one ahead
    mover.release("2")
    mover.release("2")


def test_two_who_need_a_block_that_fails_are_both_told(started: Any, gate: Gate) -> None:
    model, mover = started
    gate.open.clear()
    waiting = [beside(lambda: mover.acquire("2")) for _ in range(2)]
    assert gate.waiting.acquire(timeout=SOON_S)
    gate.failure = ModelError("the disk is gone")
    gate.open.set()
    for thread, found in waiting:
        thread.join(SOON_S)
        assert isinstance(found[0], ModelError)
    assert not any(held.users for held in mover._held.values())
    gate.failure = None
    assert weight(model, mover, "2", mover.acquire("2"))
    mover.release("2")


def test_forgetting_a_block_does_not_wait_for_its_read_nor_give_its_memory_away(started: Any, gate: Gate) -> None:
    model, mover = started
    gate.open.clear()
    with mover._changed:
        mover._fetch("1")
        mover._fetch("4")
    assert gate.waiting.acquire(timeout=SOON_S)
    soon(mover.forget_all)
    assert mover._leaving and not mover._held
    thread, found = beside(lambda: mover.acquire("5"))  # the whole ring is still being written to
    thread.join(0.3)
    assert thread.is_alive()
    gate.open.set()
    thread.join(SOON_S)
    assert weight(model, mover, "5", found[0])
    with mover._changed:  # "5" needs the room of one of the two only; the other one's read may end later
        assert mover._changed.wait_for(lambda: not mover._leaving, timeout=SOON_S)
    mover.release("5")


def test_a_change_waits_for_who_reads_the_old_image(started: Any, gate: Gate) -> None:
    model, mover = started
    gate.open.clear()
    reading, found = beside(lambda: mover.acquire("2"))
    assert gate.waiting.acquire(timeout=SOON_S)
    changing, _ = beside(lambda: mover.begin_change("2"))
    changing.join(0.3)
    assert changing.is_alive(), "the image would be written while it is read"
    soon(lambda: mover.wait_unchanged("0"))  # and the lock is free meanwhile
    gate.open.set()
    reading.join(SOON_S)
    changing.join(SOON_S)
    assert weight(model, mover, "2", found[0]) and mover._held["2"].stale
    mover.release("2")
    mover.end_change("2")
    assert weight(model, mover, "2", mover.acquire("2"))
    mover.release("2")


def test_closing_waits_for_what_still_writes(started: Any, gate: Gate) -> None:
    _, mover = started
    gate.open.clear()
    with mover._changed:
        mover._fetch("1")
    assert gate.waiting.acquire(timeout=SOON_S)
    thread, _ = beside(mover.close)
    thread.join(0.3)
    assert thread.is_alive() and mover.ring.numel()
    gate.open.set()
    thread.join(SOON_S)
    assert not thread.is_alive() and not mover.ring.numel()


def test_a_device_that_its_own_threads_fill_is_read_to_without_the_lock(
    disk: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such device is here: the transfers are told that theirs is one."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model.expected = {str(n): layer.weight.detach().clone() for n, layer in enumerate(model)}
    budgets = {"device_budget": int(2.2 * LAYER), "host_budget": 2 * 2**20}
    anytorch.memory.fit(model, "cpu", disk=disk, **budgets)
    handle = anytorch.memory.fitted(model)
    mover = handle.mover
    mover.forget_all()
    monkeypatch.setattr(mover._transfers, "device", torch.device("meta"))
    threads: list[str] = []
    monkeypatch.setattr(
        gate, "pass_through", lambda inner=gate.pass_through: (threads.append(threading.current_thread().name), inner())
    )
    steps = [step for step, home in handle.plan.homes.items() if home == "disk"]
    assert len(steps) > 3
    for step in steps * 2:
        assert weight(model, mover, step, mover.acquire(step))
        mover.release(step)
    assert set(threads) == {threading.current_thread().name} and mover.stats.fetched_ahead > 3
    mover.forget_all()
    gate.open.clear()
    thread, found = beside(lambda: mover.acquire(steps[-1]))
    assert gate.waiting.acquire(timeout=SOON_S)
    soon(lambda: mover.wait_unchanged(steps[0]))
    gate.open.set()
    thread.join(SOON_S)
    assert weight(model, mover, steps[-1], found[0])
    mover.release(steps[-1])
    handle.close()
