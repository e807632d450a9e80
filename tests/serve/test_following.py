"""Workers that load different models at the same time end with the same ones: those of the file they share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anytorch.errors import ModelError
from anytorch.serve.app import create_app
from anytorch.serve.loaders import Wanted
from anytorch.serve.models import Lineup, Load, Shared, Slot
from anytorch.serve.options import ServeOptions


class Engine:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    def alive(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Worker:
    """The state of one worker, with engines that are built when `gate` is open."""

    def __init__(self, folder: Path, first: tuple[str, ...] = ()) -> None:
        self.state: Any = create_app(ServeOptions(forecast=False)).state.service
        self.state.shared = Shared(folder)
        self.models = self.state.models
        if first:  # as if several had been named with --model
            self.models._slots["embeddings"] = {name: Slot(Wanted(name, "embeddings", None)) for name in first}
            self.models._default["embeddings"] = first[0]
            self.models.first["embeddings"] = self.models.lineup("embeddings")
        self.models._build = self.build
        self.models._wanted = lambda name, job: Wanted(name, "embeddings", None)
        self.gate, self.building, self.built, self.broken = threading.Event(), threading.Event(), [], ""
        self.gate.set()

    def build(self, wanted: Wanted) -> Any:
        self.building.set()
        assert self.gate.wait(120)
        self.built.append(wanted.id)
        if wanted.id == self.broken:
            raise ModelError("not here")
        return Engine(wanted)

    def load(self, name: str) -> asyncio.Future[Any]:
        """What POST /api/load-model does."""
        return asyncio.ensure_future(self.models.load(name, None, None, None, done=self.state.tell_others))

    async def builds(self) -> None:
        """Until a build waits at the closed gate."""
        assert await asyncio.to_thread(self.building.wait, 120)

    @property
    def loaded(self) -> list[str]:
        return [engine.wanted.id for engine in self.models.loaded("embeddings")]

    @property
    def has(self) -> tuple[list[str], str]:
        """What is loaded for embeddings, and the default."""
        return self.loaded, self.models.lineup("embeddings").default


async def beats(workers: list[Worker], happens: Callable[[], bool]) -> None:
    """The workers' beats until it happens, and a few more."""
    for _ in range(24_000):
        for worker in workers:
            worker.state.on_beat()
        await asyncio.sleep(0.005)
        if happens():
            break
    for worker in workers:
        following = worker.state._following
        if following is not None:
            await following
        worker.state.on_beat()
    assert happens(), [worker.loaded for worker in workers]


def test_loads_at_the_same_time_end_in_one_model(tmp_path: Path) -> None:
    async def run() -> None:
        one, two = Worker(tmp_path), Worker(tmp_path)
        two.gate.clear()
        two.building.clear()
        late = two.load("late")
        await two.builds()
        await one.load("early")
        for _ in range(5):
            two.state.on_beat()  # hears of "early" while it is still building "late"
            await asyncio.sleep(0.005)
        two.gate.set()
        await late
        await beats([one, two], lambda: one.loaded == two.loaded == ["late"])
        assert "early" not in two.built, "an older load is not followed after a newer one"
        for worker in (one, two):
            await worker.state.stop()

    asyncio.run(run())


def test_clients_that_wait_do_not_keep_a_worker_from_following(tmp_path: Path) -> None:
    async def run() -> None:
        one, two = Worker(tmp_path), Worker(tmp_path)
        two.gate.clear()
        two.building.clear()
        waiting = [two.load(name) for name in ("a", "b", "c")]  # one builds, two wait: no client may join them
        await two.builds()
        await one.load("early")
        for _ in range(5):
            two.state.on_beat()
            await asyncio.sleep(0.005)
        for abandoned in waiting[1:]:
            abandoned.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)
        two.gate.set()
        await waiting[0]
        await one.load("newest")
        await beats([one, two], lambda: one.loaded == two.loaded == ["newest"])
        for worker in (one, two):
            await worker.state.stop()

    asyncio.run(run())


def test_what_cannot_be_loaded_here_is_tried_again_later(tmp_path: Path) -> None:
    async def run() -> None:
        one, two = Worker(tmp_path), Worker(tmp_path)
        two.broken = "heavy"
        await one.load("heavy")
        await beats([two], lambda: two.built == ["heavy"])
        for _ in range(5):
            two.state.on_beat()
            await asyncio.sleep(0.005)
        assert two.built[:1] == ["heavy"] and two.built.count("heavy") == 1, "not at every beat"
        two.broken, two.state._not_before = "", {}  # its time has come
        await beats([two], lambda: two.loaded == ["heavy"])
        for worker in (one, two):
            await worker.state.stop()

    asyncio.run(run())


def test_several_models_of_a_job_are_the_same_everywhere(tmp_path: Path) -> None:
    """One worker sees every load, one only the last, one is started in the end: all have the same models."""

    async def run() -> None:
        first = ("a", "b")
        one, two = Worker(tmp_path, first), Worker(tmp_path, first)
        for worker in (one, two):
            worker.state.start()
        await one.load("c")  # in the place of "a"
        await one.load("b")  # in its own, and the default now
        assert one.has == (["c", "b"], "b")
        await beats([two], lambda: two.has == (["c", "b"], "b"))
        assert two.built == ["a", "b", "c"], "the b it was started with is the one it needs"
        # Two at once, in different workers: as if one had come after the other.
        two.gate.clear()
        two.building.clear()
        late = two.load("d")
        await two.builds()
        await one.load("e")
        two.gate.set()
        await late
        await beats([one, two], lambda: one.has == two.has == (["c", "d"], "d"))
        for worker in (one, two):
            await worker.state.stop()

    asyncio.run(run())


def test_a_worker_that_is_started_again_begins_with_what_the_others_have(tmp_path: Path) -> None:
    Shared(tmp_path).tell(
        Load("all-MiniLM-L6-v2", "embeddings", "cpu", "int8"),
        Lineup("embeddings", (Load("all-MiniLM-L6-v2", "embeddings", "auto", None),), "all-MiniLM-L6-v2"),
    )
    (tmp_path / "metrics").mkdir()
    (slot,) = create_app(ServeOptions(forecast=False, run_folder=tmp_path)).state.service.models.slots("embeddings")
    assert slot.wanted.quantization == "int8" and slot.wanted.device == "cpu", "and not with what it would let go again"
    Shared(tmp_path).tell(Load("gone", "embeddings", "cpu", None), Lineup("embeddings"))
    (slot,) = create_app(ServeOptions(forecast=False, run_folder=tmp_path)).state.service.models.slots("embeddings")
    assert slot.wanted.id == "all-MiniLM-L6-v2", "what cannot be found here does not keep it from starting"


def test_a_model_that_is_replaced_before_it_is_loaded_is_closed(tmp_path: Path) -> None:
    async def run() -> None:
        one = Worker(tmp_path)
        closed: list[str] = []
        one.gate.clear()
        one.building.clear()
        swap = one.load("new")
        await one.builds()
        (old,) = one.models.slots("embeddings")
        loading = asyncio.ensure_future(one.models.ready(old))  # its build waits behind the other's
        build = one.build

        def noting(wanted: Wanted) -> Any:
            engine = build(wanted)
            engine.close = lambda: closed.append(wanted.id)
            return engine

        one.models._build = noting
        await asyncio.sleep(0.02)
        one.gate.set()
        await swap
        await loading
        await one.state.stop()
        assert "all-MiniLM-L6-v2" in closed and one.built == ["new", "all-MiniLM-L6-v2"]

    asyncio.run(run())
