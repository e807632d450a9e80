"""The locks of the mover and of a stack guard their books, not the disk: a slow read stops only who needs what it reads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import until
from torch import nn

import anytorch
from anytorch.errors import ModelError
from anytorch.memory.images import views_of
from anytorch.memory.mover import Mover
from anytorch.memory.reader import File
from anytorch.memory.stack import StoreLevel, TensorStore

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


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
def test_what_was_fetched_ahead_and_fails_once_somebody_waits_for_it_is_fetched_again(
    started: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Nobody asked for it when the disk failed: the reason may be gone. A second failure is told."""
    model, mover = started
    for step in ("0", "1", "0"):
        mover.acquire(step)
        mover.release(step)
    for held in list(mover._held.values()):
        mover._forget(held.name)
    gate.open.clear()
    mover._try_ahead()  # "1" comes after "0", and is under way
    coming = mover._held["1"]
    assert not coming.asked and coming.under_way.futures
    thread, found = beside(lambda: mover.acquire("1"))
    assert gate.waiting.acquire(timeout=SOON_S)
    until(lambda: coming.users == 1, "it to be waited for")
    gate.failure, take = ModelError("the disk is gone"), mover._take

    def take_again(name: str) -> Any:
        gate.failure = gate.failure if lasting else None
        return take(name)

    monkeypatch.setattr(mover, "_take", take_again)
    gate.open.set()
    thread.join(SOON_S)
    if lasting:
        assert isinstance(found[0], ModelError) and not any(held.users for held in mover._held.values())
        return
    assert weight(model, mover, "1", found[0]) and mover._held["1"].users == 1 and mover._held["1"] is not coming
    mover.release("1")


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


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    """Room for two tensors of 1000 bytes in memory; "low" and "lower" are on the disk, "a" and "b" above it."""
    memory, disk = StoreLevel(2000, torch.device("cpu")), StoreLevel(10**6, None, tmp_path / "store")
    made = TensorStore([memory, disk])
    for number, key in enumerate(("low", "lower", "a", "b")):
        made.put(key, torch.full((250,), float(number)), priority=number)
    assert [made.level_of(key) for key in ("low", "lower", "a", "b")] == [1, 1, 0, 0]
    yield made
    made.close()
    assert not list((tmp_path / "store").iterdir())


def test_a_store_answers_while_it_reads_from_disk(store: TensorStore, gate: Gate) -> None:
    gate.open.clear()
    reading, found = beside(lambda: store.get("low"))
    assert gate.waiting.acquire(timeout=SOON_S)
    assert soon(lambda: store.level_of("low")) == 1 and soon(lambda: store.count(1)) == 3
    assert len(soon(store.keys)) == 4
    above = next(key for key in "ab" if store.level_of(key) == 0)  # the other one made room for what is being read
    assert float(soon(lambda: store.get(above))[0]) == ["low", "lower", "a", "b"].index(above)
    soon(lambda: store.put("c", torch.full((250,), 7.0), level=1))
    assert float(soon(lambda: store.remove(above))[0]) > 1
    soon(lambda: store.put("d", torch.full((250,), 8.0)))
    assert reading.is_alive() and not found and store.level_of("d") == 0
    gate.open.set()
    reading.join(SOON_S)
    assert float(found[0][0]) == 0 and store.level_of("low") == 0
    assert float(store.get("c")[0]) == 7 and float(store.get("lower")[0]) == 1  # type: ignore[index]


def test_where_a_tensor_comes_to_lie_does_not_depend_on_a_copy_under_way(tmp_path: Path, gate: Gate) -> None:
    memory, disk = StoreLevel(1000, torch.device("cpu")), StoreLevel(10**6, None, tmp_path / "store")
    with contextlib.closing(TensorStore([memory, disk])) as store:
        for number, key in enumerate("abc"):
            store.put(key, torch.full((250,), float(number)), level=1)
        gate.open.clear()
        prefetching, _ = beside(lambda: store.promote(["b"]))
        assert gate.waiting.acquire(timeout=SOON_S)
        getting, found = beside(lambda: store.get("c"))
        getting.join(0.3)
        assert getting.is_alive()  # the only place above is taken by what is being read
        gate.open.set()
        for thread in (prefetching, getting):
            thread.join(SOON_S)
        assert float(found[0][0]) == 2.0 and store.level_of("c") == 0


def test_what_a_store_reads_is_not_removed_or_replaced_before_it_is_read(store: TensorStore, gate: Gate) -> None:
    gate.open.clear()
    reading, found = beside(lambda: store.get("low"))
    assert gate.waiting.acquire(timeout=SOON_S)
    again, same = beside(lambda: store.get("low"))
    gone, removed = beside(lambda: store.remove("low"))
    for thread in (again, gone):
        thread.join(0.2)
        assert thread.is_alive()
    gate.open.set()
    for thread in (reading, again, gone):
        thread.join(SOON_S)
    assert float(found[0][0]) == float(removed[0][0]) == 0
    assert same[0] is None or float(same[0][0]) == 0  # it may have come after the removal
    assert store.level_of("low") is None and "low" not in store.ledger.holders("0")


class Late(threading.Condition):
    """A condition whose notices all come just as the wait for them ends: it answers that none came."""

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        return False


def test_a_notice_that_comes_as_the_wait_for_it_ends_is_not_lost(store: TensorStore, gate: Gate) -> None:
    store._changed = Late(threading.Lock())
    gate.open.clear()
    reading, found = beside(lambda: store.get("low"))
    assert gate.waiting.acquire(timeout=SOON_S)
    gone, removed = beside(lambda: store.remove("low"))
    gone.join(0.2)
    gate.open.set()
    for thread in (reading, gone):
        thread.join(SOON_S)
        assert not thread.is_alive(), "it waits for a notice that has come"
    assert float(found[0][0]) == float(removed[0][0]) == 0


def test_a_read_that_fails_leaves_a_store_as_it_was(store: TensorStore, gate: Gate) -> None:
    gate.failure = ModelError("the disk is gone")
    with pytest.raises(ModelError):
        store.get("low")
    gate.failure = None
    assert store.level_of("low") == 1 and not store._at_work.total()
    assert float(store.get("low")[0]) == 0  # type: ignore[index]
    keys = store.keys()
    assert sorted(store.ledger.holders("0")) == sorted(key for key in keys if store.level_of(key) == 0)


class Interrupted:
    """A lock. Ctrl-C comes once, at the next call of one of its methods other than by `with`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.at = ""

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._interrupt("acquire" if blocking else "")
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._interrupt("release")
        self._lock.release()

    def _interrupt(self, method: str) -> None:
        if method and method == self.at:
            self.at = ""
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", ["release", "acquire"])
@pytest.mark.parametrize("what", ["get", "put"])
def test_ctrl_c_beside_a_copy_leaves_the_lock_and_the_books_in_order(tmp_path: Path, what: str, at: str) -> None:
    """In the middle of a copy it comes in `test_store`; here just before the lock is let go, or while it is waited for."""
    memory, disk = StoreLevel(2000, torch.device("cpu")), StoreLevel(10**6, None, tmp_path / "store")
    store, lock = TensorStore([memory, disk]), Interrupted()
    store._changed = threading.Condition(lock)  # type: ignore[arg-type]
    store.put("low", torch.full((250,), 3.0), level=1)
    lock.at = at
    with pytest.raises(KeyboardInterrupt):
        store.get("low") if what == "get" else store.put("new", torch.zeros(250))
    assert not lock.at and not store._at_work.total()
    assert soon(lambda: (store.keys(), store.level_of("low"))) == (["low"], 1)
    assert not store.ledger.holders("0") and store.ledger.holders("1") == {"low": 1000}
    assert float(soon(lambda: store.get("low"))[0]) == 3.0 and store.level_of("low") == 0
    assert soon(lambda: store.put("new", torch.zeros(250))) == 0
    soon(store.close)


class Watched(list[torch.Tensor]):
    """Who looks whether there is something in it goes on when another one has looked, too."""

    def __init__(self, values: Iterable[torch.Tensor], looking: int) -> None:
        super().__init__(values)
        self._both = threading.Barrier(looking)

    def __len__(self) -> int:
        found = super().__len__()
        self._both.wait(SOON_S)
        return found


def test_two_readers_of_a_store_may_want_its_last_buffer(tmp_path: Path) -> None:
    nothing, disk = StoreLevel(0, torch.device("cpu")), StoreLevel(10**6, None, tmp_path / "store")
    with contextlib.closing(TensorStore([nothing, disk])) as store:
        for number, key in enumerate("ab"):
            store.put(key, torch.full((250,), float(number)), level=1)
        assert float(store.get("a")[0]) == 0 and len(store._bounces) == 1  # type: ignore[index]
        store._bounces = Watched(store._bounces, looking=2)
        reading = [beside(lambda key=key: store.get(key)) for key in "ab"]
        for thread, _ in reading:
            thread.join(SOON_S)
        assert [float(found[0][0]) for _, found in reading] == [0.0, 1.0]


def test_threads_that_share_a_store_lose_nothing(store: TensorStore) -> None:
    def work(number: int) -> bool:
        mine = [f"{number} {n}" for n in range(4)]
        for turn in range(25):
            for place, key in enumerate(mine):
                value = float(turn * 100 + number * 10 + place)
                store.put(key, torch.full((250,), value), priority=place)
                store.promote(mine)
                found = store.get(key)
                assert found is not None and float(found[0]) == value
                store.put("shared", found)
                store.get("shared")
            with store.hold(mine[turn % 4]) as held:
                level = store.level_of(mine[turn % 4])
                store.get(mine[0])
                assert float(held[0]) // 100 == turn and store.level_of(mine[turn % 4]) == level
        return all(store.remove(key) is not None for key in mine)

    threads = [beside(lambda number=number: work(number)) for number in range(4)]
    for thread, found in threads:
        thread.join(60)
        assert found == [True]
    keys = store.keys()
    assert set(keys) == {"low", "lower", "a", "b", "shared"}
    for level in (0, 1):
        held = store.ledger.holders(str(level))
        assert held == {key: 1000 for key in keys if store.level_of(key) == level}
        assert store.ledger.use(str(level)).peak <= store.places[level].capacity
