"""Workers that load different models at the same time end with the same one: the newest of the file they share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anytorch.errors import ModelError
from anytorch.serve.app import create_app
from anytorch.serve.loaders import Wanted
from anytorch.serve.options import ServeOptions
from anytorch.serve.shared import Shared


class Engine:
    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    def alive(self) -> str:
        return ""

    def close(self) -> None:
        pass


class Worker:
    """The state of one worker, with engines that are built when `gate` is open."""

    def __init__(self, folder: Path) -> None:
        self.state: Any = create_app(ServeOptions(forecast=False)).state.service
        self.state.shared = Shared(folder)
        self.models = self.state.models
        self.models._build = self.build
        self.models._wanted = lambda name, job: Wanted(name, "embeddings", None)
        self.gate, self.built, self.broken = threading.Event(), [], ""
        self.gate.set()

    def build(self, wanted: Wanted) -> Any:
        assert self.gate.wait(20)
        self.built.append(wanted.id)
        if wanted.id == self.broken:
            raise ModelError("not here")
        return Engine(wanted)

    def load(self, name: str) -> asyncio.Future[Any]:
        """What POST /api/load-model does."""
        return asyncio.ensure_future(self.models.load(name, None, None, None, done=self.state.tell_others))

    @property
    def loaded(self) -> list[str]:
        return [engine.wanted.id for engine in self.models.loaded("embeddings")]


async def beats(workers: list[Worker], happens: Callable[[], bool]) -> None:
    """The workers' beats until it happens, and a few more."""
    for _ in range(400):
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
        late = two.load("late")
        await asyncio.sleep(0.02)
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
        waiting = [two.load(name) for name in ("a", "b", "c")]  # one builds, two wait: no client may join them
        await asyncio.sleep(0.02)
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
