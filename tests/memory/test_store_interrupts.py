"""Ctrl-C at every instruction of a store's operations: the books are right afterwards, and no tensor is lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from anytorch import interrupts
from anytorch.memory import ledger, stack
from anytorch.memory.stack import StoreLevel, TensorStore

CPU = torch.device("cpu")
# The frames that change books, and Python's own in between.
WATCHED = {stack.__file__, ledger.__file__, interrupts.__file__, threading.__file__}
ROOM = 4096


def tensor(number: int) -> torch.Tensor:
    return torch.full((ROOM // 8,), number, dtype=torch.float32)  # half a level


def filled() -> TensorStore:
    """k0 and k2 up and k1 below, where there is room for one more."""
    store = TensorStore([StoreLevel(ROOM, CPU), StoreLevel(ROOM, CPU)])
    for number in range(3):
        store.put(f"k{number}", tensor(number))
    assert [store.level_of(f"k{number}") for number in range(3)] == [0, 1, 0]
    return store


def put_new(store: TensorStore) -> None:
    store.put("k3", tensor(3))


def put_again(store: TensorStore) -> None:
    store.put("k0", tensor(0).view(8, -1))


def get_from_below(store: TensorStore) -> None:
    store.get("k1")


def remove(store: TensorStore) -> None:
    store.remove("k0")


class Press:
    """A trace function that presses Ctrl-C at the instruction with a number; `seen` counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in WATCHED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.seen += 1
            if self.seen - 1 == self.at:
                signal.raise_signal(signal.SIGINT)
        return self


class Stop(KeyboardInterrupt):
    """What a program's own handler raises."""


def raise_stop(*_: Any) -> None:
    raise Stop


def run(operation: Callable[[TensorStore], None], store: TensorStore, at: int) -> tuple[int, bool]:
    """How many instructions the operation has, as far as it came; and whether it raised KeyboardInterrupt."""
    press, before = Press(at), sys.gettrace()
    sys.settrace(press)
    try:
        operation(store)
    except KeyboardInterrupt:
        return press.seen, True
    finally:
        sys.settrace(before)
    return press.seen, False


def check_books(store: TensorStore) -> None:
    """No lock is held, nobody is at work, and the ledger says what the entries say."""
    assert signal.getsignal(signal.SIGINT) in (signal.default_int_handler, raise_stop)
    assert not store._changed._lock.locked() and not store.ledger._lock.locked()  # type: ignore[attr-defined]
    assert not store._at_work.total() and not any(one.busy or one.holds for one in store._entries.values())
    for level, place in enumerate(store.places):
        held = {key: one.nbytes for key, one in store._entries.items() if one.level == level}
        assert store.ledger.holders(str(level)) == held
        assert store.ledger.free(str(level)) == place.capacity - sum(held.values())


@pytest.mark.parametrize(("operation", "step"), [(put_new, 1), (put_again, 3), (get_from_below, 3), (remove, 3)])
def test_the_books_are_right_wherever_it_comes(operation: Callable[[TensorStore], None], step: int) -> None:
    """At every instruction of a `put` that moves another tensor down; in the others at every third, to save time."""
    count, raised = run(operation, filled(), -1)
    assert count > 300 and not raised
    for at in range(0, count, step):
        store = filled()
        _, raised = run(operation, store, at)
        assert raised, f"the press at instruction {at} of {count} was lost"
        check_books(store)
        keys = set(store.keys())
        assert keys >= {"k1", "k2"} and (operation is remove or "k0" in keys)
        for key in keys:
            found = store.get(key)
            assert found is not None and torch.equal(found.view(-1), tensor(int(key[1]))), (at, key)
        store.put("k3", tensor(3))  # and the store goes on
        check_books(store)
        store.close()


def test_the_books_are_right_with_a_handler_of_the_programs_own() -> None:
    """It may raise, too; in the middle of a move an entry would stay busy, and closing the store would wait for ever."""
    before = signal.signal(signal.SIGINT, raise_stop)
    try:
        count, _ = run(put_new, filled(), -1)
        for at in range(0, count, 2):
            store = filled()
            _, raised = run(put_new, store, at)
            assert raised, f"the press at instruction {at} of {count} was lost"
            check_books(store)
            assert set(store.keys()) >= {"k0", "k1", "k2"}
            store.close()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_hold_that_is_interrupted_holds_nothing() -> None:
    store = filled()
    with pytest.raises(KeyboardInterrupt), store.hold("k0"):
        signal.raise_signal(signal.SIGINT)
    check_books(store)
    plain = store._get

    def pressed(key: str) -> torch.Tensor | None:
        signal.raise_signal(signal.SIGINT)
        return plain(key)

    store._get = pressed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), store.hold("k0"):
        pytest.fail("Ctrl-C has waited for the end of the books, and must not wait for the end of the block")
    check_books(store)


def test_who_waits_for_another_thread_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's copy under way may take long: waiting for it is nothing that has to be whole."""
    store = filled()
    monkeypatch.setattr(stack, "LOOK_S", 0.01)
    plain = store._changed.wait

    def pressed(timeout: float | None = None) -> bool:
        signal.raise_signal(signal.SIGINT)
        return plain(timeout)

    monkeypatch.setattr(store._changed, "wait", pressed)
    store._entries["k1"].busy = True  # as if a thread were at work on it
    with pytest.raises(KeyboardInterrupt):
        store.remove("k1")
    store._entries["k1"].busy = False
    check_books(store)
