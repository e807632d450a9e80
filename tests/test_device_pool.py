"""Calls on several devices: order, workers that die, errors, and nothing lost. The devices here are fakes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anytorch import device_pool
from anytorch.device_pool import DevicePool, PoolJob
from anytorch.errors import DeviceError, DeviceLost, InputError, ModelError, UsageError
from tests.waiting import until

FAKES = """
import os, signal, time
from anytorch.errors import InputError, ModelError


class Device:
    def __init__(self, device, fail="", die_on=None, refuse=None, gate=""):
        if fail == "die":
            os._exit(3)
        if fail:
            raise ModelError(fail, hint="look at it")
        self.device, self.die_on, self.refuse, self.gate = device, die_on, refuse, gate

    def double(self, number):
        print("a library that prints")
        if self.gate:
            open(self.gate + self.device[-1], "w").close()
        while self.gate and not os.path.exists(self.gate):
            time.sleep(0.01)
        if number == self.die_on:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.refuse:
            raise RuntimeError(f"{self.device} cannot compute {number}")
        if number < 0:
            raise InputError(f"{number} is below 0")
        return self.device, 2 * number

    def function(self):
        return lambda: self
"""
Make = Callable[..., DevicePool]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "device_fakes.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[DevicePool] = []

    def pool(*arguments: dict[str, Any]) -> DevicePool:
        jobs = [
            PoolJob(f"fake:{n}", "device_fakes:Device", {"device": f"fake:{n}", **one})
            for n, one in enumerate(arguments)
        ]
        made.append(DevicePool(jobs))
        return made[-1]

    yield pool
    for one in made:
        one.close()


def kill(process: int | None) -> None:
    assert process, "0 would be all processes of this test run"
    os.kill(process, signal.SIGKILL)


def doubled(pool: DevicePool, numbers: range) -> list[int]:
    futures = [pool.submit("double", number) for number in numbers]
    return [future.result(120)[1] for future in futures]


def test_every_call_comes_back_to_who_made_it_and_all_devices_work(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool = make({"gate": str(gate)}, {"gate": str(gate)})
    futures = [pool.submit("double", number) for number in range(20)]
    until(lambda: all((tmp_path / f"gate{n}").exists() for n in range(2)))  # each is at the gate with a call of its own
    gate.touch()
    answers = [future.result(120) for future in futures]
    assert [number for _, number in answers] == [2 * number for number in range(20)]
    assert {device for device, _ in answers} == {"fake:0", "fake:1"}
    assert sum(worker["calls"] for worker in pool.describe()) == 20


def test_nothing_is_lost_when_a_device_dies(make: Make) -> None:
    pool = make({}, {})
    process = pool.process_ids[0]
    futures = [pool.submit("double", number) for number in range(50)]
    kill(process)
    assert [future.result(120)[1] for future in futures] == [2 * number for number in range(50)]
    until(lambda: pool.process_ids[0] not in (None, process))  # and it is started again


def test_a_device_that_dies_with_nothing_to_do_is_started_again_and_costs_no_call_a_try(make: Make) -> None:
    pool = make({}, {})
    before = list(pool.process_ids)
    for process in before:
        kill(process)
    until(lambda: all(new not in (None, old) for new, old in zip(pool.process_ids, before, strict=True)))
    assert doubled(pool, range(5)) == [0, 2, 4, 6, 8]
    assert [worker["starts"] for worker in pool.describe()] == [2, 2]


def test_a_call_given_to_dead_devices_has_not_been_tried(make: Make) -> None:
    pool = make({}, {})
    with pool._changed:  # before the pool's threads have looked at their processes, and started others
        for process in pool.process_ids:
            kill(process)
        until(lambda: pool.process_ids == [None, None])
        futures = [pool.submit("double", number) for number in range(5)]
    assert [future.result(120)[1] for future in futures] == [0, 2, 4, 6, 8]


def test_a_call_that_kills_a_device_is_tried_on_another_and_then_raises(make: Make) -> None:
    pool = make({"die_on": 7}, {})
    assert doubled(pool, range(12)) == [2 * number for number in range(12)]
    both = make({"die_on": 7}, {"die_on": 7})
    bad = both.submit("double", 7)
    with pytest.raises(DeviceLost, match="ended during double"):
        bad.result(120)
    assert doubled(both, range(5)) == [0, 2, 4, 6, 8]


def test_errors_are_the_callers_or_the_devices(make: Make) -> None:
    pool = make({"refuse": 3}, {})
    assert doubled(pool, range(6)) == [0, 2, 4, 6, 8, 10]  # the other device can
    with pytest.raises(InputError, match="-1 is below 0"):
        pool.submit("double", -1).result(120)
    alone = make({"refuse": 3})
    with pytest.raises(DeviceError, match="fake:0 cannot compute 3"):
        alone.submit("double", 3).result(120)


def test_what_cannot_go_between_processes_is_told_and_costs_no_other_call(make: Make) -> None:
    pool = make({})
    with pytest.raises(UsageError, match=r"an argument of double cannot go to another process: .*lambda"):
        pool.submit("double", lambda: 1)
    with pytest.raises(DeviceError, match="lambda"):
        pool.submit("function").result(120)
    assert doubled(pool, range(3)) == [0, 2, 4] and pool.describe()[0]["starts"] == 1
    with pytest.raises(UsageError, match=r"an argument for fake:0 cannot go to another process: .*lambda"):
        make({"gate": lambda: 1})


def test_devices_that_cannot_start(make: Make) -> None:
    pool = make({"fail": "no such model"}, {})
    assert doubled(pool, range(3)) == [0, 2, 4] and "no such model" in pool.describe()[0]["failure"]
    with pytest.raises(ModelError, match="no such model"):
        make({"fail": "no such model"})
    with pytest.raises(DeviceLost, match="before it was ready"):
        make({"fail": "die"})
    with pytest.raises(UsageError, match="at least one device"):
        DevicePool([])


def test_closing_ends_the_processes_and_what_waits(make: Make, tmp_path: Path) -> None:
    pool = make({})
    process = pool.process_ids[0]
    pool.close()
    assert process and pool.process_ids == [None]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    with pytest.raises(UsageError, match="closed"):
        pool.submit("double", 1)


def test_a_cancelled_call_hinders_no_close(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    pool = make({"gate": str(gate)})
    first = pool.submit("double", 1)
    until(lambda: (tmp_path / "gate0").exists())
    waiting, cancelled = pool.submit("double", 2), pool.submit("double", 3)
    assert cancelled.cancel()
    gate.touch()
    assert first.result(120)[1] == 2 and waiting.result(120)[1] == 4
    gate.unlink()
    (tmp_path / "gate0").unlink()
    pool.submit("double", 4)
    until(lambda: (tmp_path / "gate0").exists())
    left, cancelled = pool.submit("double", 5), pool.submit("double", 6)
    assert cancelled.cancel()
    gate.touch()
    pool.close()
    assert cancelled.cancelled() and left.done()


def test_a_call_on_its_way_to_a_device_when_the_pool_closes_is_answered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make({})
    on_its_way, send = threading.Event(), device_pool.send

    def late(pipe: Any, what: Any) -> None:
        on_its_way.set()
        until(lambda: pipe.closed)
        send(pipe, what)

    monkeypatch.setattr(device_pool, "send", late)
    call = pool.submit("double", 1)
    assert on_its_way.wait(120)
    pool.close()
    with pytest.raises(UsageError, match="closed"):
        call.result(120)


def test_a_process_that_the_system_refuses_is_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = subprocess.Popen, [True]

    def popen(*arguments: Any, **options: Any) -> Any:
        if refused:
            refused.clear()
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    pool = make({}, {})
    assert doubled(pool, range(3)) == [0, 2, 4]
    assert [("cannot be started" in worker.get("failure", "")) for worker in pool.describe()].count(True) == 1
    refused.append(True)
    with pytest.raises(DeviceError, match="cannot be started"):
        make({})
