"""`devices=`: which workers it means, how many processes the CPU gets, and an engine that works with them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.waiting import until

from anytorch.devices.types import Candidate, State
from anytorch.errors import DeviceFallbackWarning, DeviceUnavailable, UnknownDevice, UsageError
from anytorch.measured import store
from anytorch.measured.verdict import Question, Trial, Verdict
from anytorch.text.embed import engine as engine_module
from anytorch.text.embed import pool_devices
from anytorch.text.embed.encoder_device import EncoderDevice
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.pool import PoolEncoder, PoolJob
from anytorch.text.embed.pool_devices import choose_devices, cpu_jobs

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
        "PoolJob",
        lambda device, arguments, cores=(): PoolJob(device, arguments, cores, factory="device_fakes:Encoder"),
    )


def as_device(name: str | None) -> EncoderDevice:
    if name == "broken":
        return EncoderDevice("cpu", "cpu", "fell back", True)
    return EncoderDevice(str(name), str(name), "a test's")


# --- which devices -----------------------------------------------------------------------------------------------------


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_devices, "choose_device", as_device)
    assert [place.id for place in choose_devices(["cuda:0", "cuda:1"])] == ["cuda:0", "cuda:1"]
    assert [place.id for place in choose_devices("cuda:0, cuda:1")] == ["cuda:0", "cuda:1"]
    assert [place.id for place in choose_devices(["cpu", "cpu", "cpu"])] == ["cpu"] * 3
    assert [place.id for place in choose_devices(["broken", "cuda:1"])] == ["cuda:1"], "left out"
    only = choose_devices(["broken", "broken"])
    assert [place.id for place in only] == ["cpu"] and only[0].fell_back
    with pytest.raises(UsageError, match="cuda:0 is named twice"):
        choose_devices(["cuda:0", "cuda:0"])
    with pytest.raises(UsageError, match="names no device"):
        choose_devices([])


def test_devices_that_are_not_there(cpu_wheel: None) -> None:
    with pytest.raises(UnknownDevice):
        choose_devices(["cdua:0"])
    with pytest.warns(DeviceFallbackWarning, match="'cuda:0' cannot be used"):
        assert [place.id for place in choose_devices(["cuda:0", "cpu", "cpu"])] == ["cpu", "cpu"]


def test_strictly(cpu_wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_STRICT", "1")
    with pytest.raises(DeviceUnavailable):
        choose_devices(["cuda:0", "cpu"])


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
    assert [place.id for place in choose_devices("all")] == ["cuda:0", "cuda:2"]
    found[:] = [candidate("webgpu:0", software=True), candidate("cpu")]
    assert [place.id for place in choose_devices("all")] == ["cpu"], "a software adapter is no device to wait for"


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
    for rates, wanted in (([100, 104], "1"), ([100, 120, 121], "2"), ([100, 90, 150], "4")):
        trials = [Trial(str(2**place), 1 / rate) for place, rate in enumerate(rates)]
        assert pool_devices.fastest(trials, noise=pool_devices.GAIN)[0] == wanted
    assert pool_devices.candidates(1) == [1] and pool_devices.candidates(3) == [1, 2]


def test_the_measurement_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = replace(pool_devices.snapshot().cpu, quota=None)
    monkeypatch.setattr(pool_devices, "snapshot", lambda: SimpleNamespace(cpu=cpu))
    if cpu.usable < 2:
        assert pool_devices.best_processes(lambda count: [], spec="x")[0] == 1
        return
    asked: list[str] = []

    def compared(jobs: Any, counts: list[int], question: Question, budget_s: float) -> Verdict:
        asked.append(question.facts["spec"])
        return Verdict(question, (Trial("1", 1.0), Trial("2", 0.5)), "2", "why", budget_s)

    monkeypatch.setattr(pool_devices, "compared", compared)
    for _ in range(2):
        assert pool_devices.best_processes(lambda count: [], spec="x") == (
            2,
            "measured on this CPU, processes and their speed: 1: 1.00, 2: 2.00",
        )
    assert asked == ["x"] and [found.chosen for found in store.verdicts()] == ["2"]
    pool_devices.best_processes(lambda count: [], spec="another model")
    assert asked == ["x", "another model"]


def test_measuring_with_real_processes(fake_workers: None) -> None:
    def jobs(count: int) -> list[PoolJob]:
        return [PoolJob("fake", {"device": "fake"}, factory="device_fakes:Encoder") for _ in range(count)]

    found = pool_devices.compared(jobs, [1, 2], Question("processes", "fake", "cpu"), 60.0)
    assert [one.name for one in found.trials] == ["1", "2"]
    assert all(one.seconds and one.error == 0 for one in found.trials), found.explain()


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

    def each_had_a_batch() -> bool:  # a worker may start late, when the other has done it all
        made.encode(TEXTS)
        return all(worker["batches"] for worker in made.describe()["encoder"]["workers"])

    until(each_had_a_batch)
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
            process = encoder.process_ids[0]
            assert process, "0 would be all processes of this test run"
            killed.append(process)
            os.kill(process, signal.SIGKILL)

    np.testing.assert_array_equal(made.encode(TEXTS, progress=kill_once), expected)
    until(lambda: encoder.describe()["workers"][0]["starts"] == 2, "another worker")
    assert killed and encoder.describe()["workers"][0]["starts"] == 2
    assert json.dumps(made.describe()), "plain values all the same"


def test_one_device_needs_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_devices, "build_encoder", lambda *given, **named: ("an encoder", "here"))
    recipe: Any = SimpleNamespace(folder="model")
    options: dict[str, Any] = {"quantization": None, "dtype": "auto", "threads": None}
    made = pool_devices.build_encoders(["cpu"], [as_device("cpu")], recipe, ("mean",), **options)
    assert made == ("an encoder", "here")


def test_the_real_encoder_gives_the_same_bits(real_engine: Callable[..., ArrowEngine], model_folder: Path) -> None:
    texts = ["A first text.", "Another, a longer one, about nothing in particular.", ""] * 20
    alone = real_engine().encode(texts)
    with engine_module.ArrowEngine(model_folder, devices=["cpu", "cpu"]) as several:
        np.testing.assert_array_equal(several.encode(texts), alone)
