"""Ctrl-C waits where it should, comes where it may, and never leaves its handler behind."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from anytorch import interrupts
from anytorch.interrupts import Interrupt, held_back


def pressed() -> None:
    signal.raise_signal(signal.SIGINT)


def usual() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_end_of_a_block() -> None:
    done: list[str] = []
    interrupt = Interrupt()
    with pytest.raises(KeyboardInterrupt), interrupt:
        done.append("before")
        with interrupt.held():
            pressed()
            done.append("held")
        done.append("never")
    assert done == ["before", "held"] and not interrupt.broken
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_does_not_wait() -> None:
    now = [0.0]
    interrupt = Interrupt(lambda: now[0])
    done: list[str] = []
    with interrupt:
        with pytest.raises(KeyboardInterrupt), interrupt.held():
            pressed()
            now[0] = 0.5  # torchrun, of the same one
            pressed()
            done.append("held")
            now[0] = 2.0
            pressed()
            done.append("never")
        now[0] = 9.0
        with interrupt.ignored():
            pressed()
    assert done == ["held"] and interrupt.broken


def test_somebody_elses_handler_is_left_alone() -> None:
    def other(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, other)
    try:
        interrupt = Interrupt()
        with pytest.raises(KeyboardInterrupt), interrupt, interrupt.held():
            assert signal.getsignal(signal.SIGINT) is other
            pressed()
        assert interrupt.broken
    finally:
        signal.signal(signal.SIGINT, before)
    seen: list[Any] = []

    def elsewhere() -> None:
        with Interrupt() as found, found.held(), found.ignored():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_block_is_whole_and_the_press_is_not_lost() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), held_back():
        pressed()
        with held_back():
            done.append("the inner one does not end the waiting")
        done.append("the rest")
    assert len(done) == 2 and usual()
    with pytest.raises(KeyboardInterrupt) as raised, held_back():
        pressed()
        raise ValueError("something else, too")
    assert isinstance(raised.value.__context__, ValueError) and usual()
    with held_back():
        pass
    interrupts.check()


def test_a_check_lets_it_come() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), held_back():
        interrupts.check()
        done.append("nobody pressed")
        pressed()
        interrupts.check()
        done.append("never")
    assert done == ["nobody pressed"] and usual()


def test_a_block_within_somebodys_interrupt_waits_for_its_own_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), Interrupt():
        with held_back():
            pressed()
            done.append("held")
        done.append("never")
    assert done == ["held"] and usual()


def test_the_programs_own_handler_waits_too() -> None:
    done: list[str] = []

    class Stop(Exception):
        pass

    def note(number: int, _: Any) -> None:
        done.append(f"told of {number}")
        if "raise" in done:
            raise Stop

    before = signal.signal(signal.SIGINT, note)
    try:
        with held_back():
            pressed()
            done.append("held")
            interrupts.check()
            interrupts.check()  # it was told, once
        assert done == ["held", f"told of {signal.SIGINT:d}"] and signal.getsignal(signal.SIGINT) is note
        done[:] = ["raise"]
        with pytest.raises(Stop), held_back():
            pressed()
            done.append("held")
        assert done == ["raise", "held", f"told of {signal.SIGINT:d}"] and signal.getsignal(signal.SIGINT) is note
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with held_back():
            pressed()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing_back() -> None:
    seen: list[bool] = []

    def elsewhere() -> None:
        with held_back():
            interrupts.check()
            seen.append(usual())

    with held_back():
        pressed_before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [True] and pressed_before is not signal.default_int_handler
