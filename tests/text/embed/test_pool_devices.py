"""`devices=`: which workers it means, how many processes the CPU gets, and an engine that works with them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anytorch.cache import Store
from anytorch.devices.types import Candidate, State
from anytorch.errors import DeviceFallbackWarning, DeviceUnavailable, UnknownDevice, UsageError
from anytorch.text.embed import engine as engine_module
from anytorch.text.embed import pool_devices, pool_layout
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.place import Place
from anytorch.text.embed.pool import Job, PoolEncoder
from anytorch.text.embed.pool_devices import choose_places, cpu_jobs

# What a worker of these tests computes: the sum of a text's tokens, and its length.
FAKES = """
import numpy as np


class Encoder:
    width, padded = 4, False

    def __init__(self, **given):
        self.given = given

    def run(self, ids, starts):
        sums = np.add.reduceat(ids, starts[:-1]).astype(np.float32)
        return np.stack([sums, np.diff(starts).astype(np.float32), sums * 0, sums * 0 + 1], 1)

    def describe(self):
        return {"device": self.given["device"], "kernels": "fake"}

    def close(self):
        pass
"""


@pytest.fixture
def fake_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "device_fakes.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        pool_devices,
        "Job",
        lambda device, arguments, cores=(): Job(device, arguments, cores, factory="device_fakes:Encoder"),
    )


def as_place(name: str | None) -> Place:
    if name == "broken":
        return Place("cpu", "cpu", "fell back", True)
    return Place(str(name), str(name), "a test's")


# --- which devices -----------------------------------------------------------------------------------------------------


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_devices, "choose_place", as_place)
    assert [place.id for place in choose_places(["cuda:0", "cuda:1"])] == ["cuda:0", "cuda:1"]
    assert [place.id for place in choose_places("cuda:0, cuda:1")] == ["cuda:0", "cuda:1"]
    assert [place.id for place in choose_places(["cpu", "cpu", "cpu"])] == ["cpu"] * 3
    assert [place.id for place in choose_places(["broken", "cuda:1"])] == ["cuda:1"], "left out"
    only = choose_places(["broken", "broken"])
    assert [place.id for place in only] == ["cpu"] and only[0].fell_back
    with pytest.raises(UsageError, match="cuda:0 is named twice"):
        choose_places(["cuda:0", "cuda:0"])
    with pytest.raises(UsageError, match="names no device"):
        choose_places([])


def test_devices_that_are_not_there(cpu_wheel: None) -> None:
    with pytest.raises(UnknownDevice):
        choose_places(["cdua:0"])
    with pytest.warns(DeviceFallbackWarning, match="'cuda:0' cannot be used"):
        assert [place.id for place in choose_places(["cuda:0", "cpu", "cpu"])] == ["cpu", "cpu"]


def test_strictly(cpu_wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    with pytest.raises(DeviceUnavailable):
        choose_places(["cuda:0", "cpu"])


def test_all_devices_are_those_of_the_best_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def candidate(name: str, **facts: Any) -> Candidate:
        made = SimpleNamespace(id=name, torch_name=name, backend=name.partition(":")[0], software=False)
        made.state = State.USABLE
        made.__dict__.update(facts)
        return made  # type: ignore[return-value]

    found = [
        candidate("cuda:0"),
        candidate("cuda:1", state=State.UNUSABLE),
        candidate("cuda:2"),
        candidate("webgpu:0"),  # the same card once more
        candidate("cpu"),
    ]
    monkeypatch.setattr(pool_devices, "survey", lambda tried: SimpleNamespace(devices=found))
    assert [place.id for place in choose_places("all")] == ["cuda:0", "cuda:2"]
    found[:] = [candidate("webgpu:0", software=True), candidate("cpu")]
    assert [place.id for place in choose_places("all")] == ["cpu"], "a software adapter is no device to wait for"


# --- the CPU's processes -----------------------------------------------------------------------------------------------


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimpleNamespace(usable=8)
    monkeypatch.setattr(pool_devices, "snapshot", lambda: SimpleNamespace(cpu=cpu))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    jobs = cpu_jobs(3, {}, None)
    assert [job.cores for job in jobs] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [job.arguments["threads"] for job in jobs] == [2, 2, 2]
    assert [job.arguments["threads"] for job in cpu_jobs(2, {}, 4)] == [2, 2]
    assert cpu_jobs(1, {}, None)[0].cores == (), "one process is not tied to cores"


def test_several_processes_must_be_worth_it() -> None:
    assert pool_layout.choose({1: 100.0, 2: 104.0}) == 1
    assert pool_layout.choose({1: 100.0, 2: 120.0, 4: 121.0}) == 2
    assert pool_layout.choose({1: 100.0, 2: 90.0, 4: 150.0}) == 4
    assert pool_layout.candidates(1) == [1] and pool_layout.candidates(3) == [1, 2]


def test_the_measurement_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = replace(pool_layout.snapshot().cpu, quota=None)
    monkeypatch.setattr(pool_layout, "snapshot", lambda: SimpleNamespace(cpu=cpu))
    if cpu.usable < 2:
        assert pool_layout.best_processes(lambda count: [], spec="x")[0] == 1
        return
    asked: list[list[int]] = []

    def measure(jobs: Any, counts: list[int]) -> dict[int, float]:
        asked.append(counts)
        return {1: 1.0, 2: 2.0}

    monkeypatch.setattr(pool_layout, "measure", measure)
    assert pool_layout.best_processes(lambda count: [], spec="x") == (
        2,
        "measured on this CPU, processes and their speed: 1: 1.00, 2: 2.00",
    )
    assert pool_layout.best_processes(lambda count: [], spec="x")[0] == 2
    assert len(asked) == 1 and list(Store("embed-processes").entries().values()) == [2]
    pool_layout.best_processes(lambda count: [], spec="another model")
    assert len(asked) == 2


def test_measuring_with_real_processes(fake_workers: None) -> None:
    def jobs(count: int) -> list[Job]:
        return [Job("fake", {"device": "fake"}, factory="device_fakes:Encoder") for _ in range(count)]

    rates = pool_layout.measure(jobs, [1, 2])
    assert set(rates) == {1, 2} and all(rate > 0 for rate in rates.values())


# --- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(model_folder: Path, fake_workers: None) -> Iterator[Callable[..., ArrowEngine]]:
    made: list[ArrowEngine] = []

    def make(**options: Any) -> ArrowEngine:
        made.append(ArrowEngine(model_folder, normalize=False, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


TEXTS = [f"text {number} " + "word " * (number % 40) for number in range(500)]


def test_an_engine_on_several_devices(engine: Callable[..., ArrowEngine]) -> None:
    made = engine(devices=["cpu", "cpu"], batch_tokens=256)
    vectors = made.encode(TEXTS)
    tokens = made.tokenize(TEXTS)
    np.testing.assert_array_equal(vectors[:, 0], np.add.reduceat(tokens.ids, tokens.starts[:-1]).astype(np.float32))
    np.testing.assert_array_equal(vectors[:, 1], tokens.lengths)
    assert made.device == "cpu, cpu" and "2 processes" in made.explain()
    until = time.monotonic() + 20  # a worker may start late, when the other has done it all
    while not all(worker["batches"] for worker in made.describe()["encoder"]["workers"]):
        assert time.monotonic() < until
        made.encode(TEXTS)
    np.testing.assert_array_equal(np.stack(list(made.encode_iter(TEXTS[:50]))), vectors[:50])


def test_the_queue_on_several_devices(engine: Callable[..., ArrowEngine]) -> None:
    made = engine(devices=["cpu", "cpu"])
    np.testing.assert_array_equal(made.queue.encode(TEXTS[:30]), made.encode(TEXTS[:30]))


def test_a_worker_is_killed_while_an_engine_encodes(engine: Callable[..., ArrowEngine]) -> None:
    made = engine(devices=["cpu", "cpu"], batch_tokens=256)
    expected = made.encode(TEXTS)
    encoder: Any = made._runner.encoder
    assert isinstance(encoder, PoolEncoder)
    killed: list[int] = []

    def kill_once(done: int, total: int | None) -> None:
        if not killed and done > 50:
            killed.append(encoder.process_ids[0] or 0)
            os.kill(killed[0], signal.SIGKILL)

    np.testing.assert_array_equal(made.encode(TEXTS, progress=kill_once), expected)
    until = time.monotonic() + 20
    while encoder.describe()["workers"][0]["starts"] < 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert killed and encoder.describe()["workers"][0]["starts"] == 2
    assert json.dumps(made.describe()), "plain values all the same"


def test_one_device_needs_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_devices, "build_encoder", lambda *given, **named: ("an encoder", "here"))
    recipe: Any = SimpleNamespace(folder="model")
    options: dict[str, Any] = {"quantization": None, "dtype": "auto", "threads": None}
    made = pool_devices.build_encoders(["cpu"], [as_place("cpu")], recipe, ("mean",), **options)
    assert made == ("an encoder", "here")


def test_the_real_encoder_gives_the_same_bits(real_engine: Callable[..., ArrowEngine], model_folder: Path) -> None:
    texts = ["A first text.", "Another, a longer one, about nothing in particular.", ""] * 20
    alone = real_engine().encode(texts)
    with engine_module.ArrowEngine(model_folder, devices=["cpu", "cpu"]) as several:
        np.testing.assert_array_equal(several.encode(texts), alone)
