"""The state the end points share: one value, made with the app, at `request.app.state.service`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import Depends, Request

from anytorch import logs
from anytorch.devices.memory import memory
from anytorch.errors import AnytorchError
from anytorch.probe.activity import Activity
from anytorch.serve.benchmarks import BenchmarkRunner
from anytorch.serve.limits import Guard
from anytorch.serve.loaders import EmbeddingModel, ForecastModel, Model, TextModel, Wanted
from anytorch.serve.machine import SurveyCache
from anytorch.serve.metrics import Look, Metrics
from anytorch.serve.models import JOBS, Lineup, Registry, Shared, Slot
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem
from anytorch.serve.threads import Pools

log = logs.logger(__name__)


async def service_of(request: Request) -> State:  # a plain function would go through a thread for every request
    state: State = request.app.state.service
    return state


def allowed_s(request: Request, options: ServeOptions) -> float:
    """A request's time limit in seconds, from its header or the options. (The guard has checked the header.)"""
    return min(options.timeout_s, float(request.headers.get("x-request-timeout", options.timeout_s)))


TRY_AGAIN_S = 30.0  # with a model that another worker has and that could not be loaded here


class State:
    def __init__(self, options: ServeOptions, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self.shared = None if options.run_folder is None else Shared(options.run_folder)
        # A worker that is started again begins with what the others have by now.
        self.pools = Pools(options.timeout_s, options.max_waiting_tokens)
        self.models = Registry(options, self.build, [] if self.shared is None else self.shared.newest(), self.pools)
        self.started = time.monotonic()
        self.created = int(time.time())
        self.draining = False
        self.guard: Guard  # set by the app
        self.surveys = SurveyCache(self.pools.questions)
        self.activity = Activity()
        self.benchmarks = BenchmarkRunner()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._refreshing: asyncio.Future[None] | None = None
        self._following: asyncio.Future[None] | None = None
        self._not_before: dict[Lineup, float] = {}  # what could not be followed here, and when to try again

    def build(self, wanted: Wanted) -> Model:
        """Load a model; runs in the registry's thread."""
        if wanted.job == "embeddings":
            return EmbeddingModel(wanted, self.options, self.metrics.batch)
        return ForecastModel(wanted, self.options) if wanted.job == "forecast" else TextModel(wanted)

    def look(self) -> Look:
        """Read the values the metrics report."""
        found = [(job, model) for job in JOBS for model in self.models.loaded(job)]
        queues = {model.info.id: model.queue.stats for _, model in found if isinstance(model, EmbeddingModel)}
        devices = {model.info.device or "" for _, model in found} | {"cpu"}
        uses = {device: memory(device).allocated for device in sorted(devices) if "," not in device}
        return Look(
            queues,
            {device: nbytes for device, nbytes in uses.items() if nbytes is not None},
            [(job, model.info.id, model.info.device or "") for job, model in found],
            self.guard.under_way,
        )

    def needed(self) -> list[Slot]:
        """The models without which the service is not ready: those of the first job that it was given."""
        for job in ("embeddings", "text", "forecast"):
            if slots := [slot for slot in self.models.slots(job) if slot.wanted.at_once]:
                return slots
        return []

    def start(self) -> None:
        for slot in self.needed():
            self.keep(asyncio.ensure_future(self.models.ready(slot)))

    def load_rest(self) -> None:
        """Load the remaining models in the background."""
        for job in JOBS:
            for slot in self.models.slots(job):
                if slot.wanted.at_once and slot.model is None and slot.loading is None and slot.error is None:
                    self.keep(asyncio.ensure_future(self.models.ready(slot)))

    def tell_others(self, slot: Slot) -> None:
        """Tell the other workers, also those started later, to load a model that was loaded here."""
        if self.shared is not None:
            self.shared.tell(slot.load, self.models.first[slot.wanted.job])

    def on_beat(self) -> None:
        """Called about every second in a worker, on the event loop."""
        if (self._following is None or self._following.done()) and self._behind() is not None:
            self._following = asyncio.ensure_future(self._follow())
            self.keep(self._following)
        if all(slot.model is not None for slot in self.needed()):
            self.load_rest()
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self.pools.questions.run(self.metrics.refresh))
            self.keep(self._refreshing)

    def _behind(self) -> Lineup | None:
        """The models other workers have and this one lacks, except those that failed here a moment ago."""
        for lineup in [] if self.shared is None else self.shared.newest():
            if self.models.lineup(lineup.job) != lineup and time.monotonic() >= self._not_before.get(lineup, 0.0):
                return lineup
        return None

    async def _follow(self) -> None:
        """Load models until they match the shared file, which may change meanwhile."""
        lineup: Lineup | None = None

        def choose() -> Lineup | None:
            nonlocal lineup
            lineup = self._behind()  # asked again when it is our turn
            return lineup

        more = True
        while more:
            try:
                more = await self.models.follow(choose)
            except (Problem, AnytorchError) as exc:
                assert lineup is not None
                self._not_before[lineup] = time.monotonic() + TRY_AGAIN_S
                log.warning("what another worker has loaded cannot be loaded here: %s", exc)

    def keep(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the slot has kept it

    async def stop(self) -> None:
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await self.models.close()


Service = Annotated[State, Depends(service_of)]  # an end point's parameter of this type is the service's state
