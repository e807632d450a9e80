"""Threads that the system refuses: fewer do the work, none is a clear error, and nothing is done that failed."""

from __future__ import annotations

import threading

import pytest

from anytorch.errors import NoThread
from anytorch.measured.compiling import Compiling
from anytorch.workers import Workers, start
from tests.faulty_disk import failing_threads


def test_fewer_threads_do_all_of_it() -> None:
    all_there = threading.Event()

    def work(number: int) -> int:
        assert all_there.wait(120)  # nobody is done before, so that every call wants a thread of its own
        return number

    for at in range(2, 5):
        all_there.clear()
        with failing_threads(at, on=True) as counter, Workers(4, "some") as workers:
            asked = [workers.submit(work, number) for number in range(8)]
            all_there.set()
            found = [one.result(120) for one in asked]
        assert found == list(range(8)) and counter.failed


def test_what_failed_is_not_done_later() -> None:
    done: list[int] = []
    with Workers(2, "some") as workers:
        with failing_threads(1), pytest.raises(NoThread, match=r"no thread for some: can't start new thread"):
            workers.submit(done.append, 1)
        workers.submit(done.append, 2).result()
    assert done == [2]


def test_one_thread() -> None:
    thread = threading.Thread(target=lambda: None, name="mine")
    with failing_threads(1), pytest.raises(NoThread, match="mine"):
        start(thread)
    start(thread)
    thread.join()


@pytest.mark.parametrize("at", [1, 2])
def test_compilers_beside(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a help, not a need: with fewer threads it goes on, with none nothing is compiled ahead."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    done: list[int] = []
    with failing_threads(at, on=True):
        beside = Compiling({("a", str(n)): lambda n=n: done.append(n) for n in range(3)}, 60)  # type: ignore[misc]
    beside.wait()
    assert done == ([] if at == 1 else [0, 1, 2])
    assert not beside.waiting and not beside.under_way and beside.at_work == 0
