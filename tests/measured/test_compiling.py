"""Tasks that threads work off beside the work: quick turns, cancelling, and the end of a process."""

from __future__ import annotations

import sys
import threading
import weakref
from functools import partial
from typing import Any

import pytest
from tests.waiting import until

from anytorch.measured import compiling
from anytorch.measured.compiling import Compiling


class Kept:
    """Something a task holds on to."""


def test_python_changes_threads_quickly_while_it_compiles() -> None:
    until(lambda: not compiling._quick, "compilers that other tests have left behind to end")
    before = sys.getswitchinterval()
    found: list[float] = []
    tasks = {("part", str(number)): lambda: found.append(sys.getswitchinterval()) for number in range(5)}
    try:
        sys.setswitchinterval(0.005)
        Compiling(tasks, 60.0).wait()
        assert len(found) == 5 and max(found) == pytest.approx(compiling.TURN)
        assert sys.getswitchinterval() == pytest.approx(0.005)
    finally:
        sys.setswitchinterval(before)


def test_what_nobody_waits_for_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast of another shape has come: what was to be compiled holds the memory of the last one."""
    begun, ended = threading.Event(), threading.Event()
    kept = Kept()
    alive = weakref.ref(kept)

    def first() -> None:
        begun.set()
        ended.wait(120)

    tasks: dict[Any, Any] = {("part", "first"): first, ("part", "second"): partial(id, kept)}
    monkeypatch.setattr(compiling, "COMPILERS", 1)
    work = Compiling(tasks, 60.0)
    begun.wait(120)
    del kept, tasks
    assert alive() is not None
    work.cancel()
    assert alive() is None and work.under_way
    ended.set()
    work.wait()
    assert work.done == {("part", "first")}


def test_a_process_that_ends_waits_for_what_is_at_hand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        ended.wait(120)
        done.append("first")

    tasks = {("part", "first"): first} | {("part", str(n)): (lambda n=n: done.append(str(n))) for n in range(3)}
    monkeypatch.setattr(compiling, "COMPILERS", 1)
    work = Compiling(tasks, 60.0)
    begun.wait(120)
    assert work.under_way
    work.cancel()
    ended.set()
    work.stop()
    assert done == ["first"] and work.done == {("part", "first")} and not work.under_way


def test_a_task_is_called_the_way_that_is_asked_for_and_may_fail() -> None:
    called: list[str] = []

    def call(task: compiling.Task) -> None:
        called.append("before")
        task()

    def fails() -> None:
        raise RuntimeError("no such target")

    work = Compiling({("part", "fails"): fails}, 60.0, call)
    work.wait()
    assert called == ["before"] and work.done == {("part", "fails")}, "running it says so again"


def test_what_is_not_begun_in_time_is_left_out() -> None:
    work = Compiling({("part", "late"): lambda: pytest.fail("it was compiled")}, 0.0)
    work.wait()
    assert not work.done and not work.waiting
