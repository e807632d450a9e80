"""The service's models: which are loaded, which one a request means, and how one replaces another without losing requests.

All of it happens on the event loop's thread, so that no lock is needed; only building an engine, which takes seconds, is
done in a thread. Requests hold their model while they use it (`use`), and a model that was replaced is closed when the
last of them lets go.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from traceback import format_exception
from typing import Any, TypeVar

from anytorch import logs
from anytorch.errors import AnytorchError
from anytorch.files import replace_file
from anytorch.serve.loaders import Found, Model, Wanted, first_models, list_models, wanted_by
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem, retry_after
from anytorch.serve.schemas import ModelInfo
from anytorch.serve.threads import Pools

log = logs.logger(__name__)

JOBS = ("embeddings", "forecast", "text")
Build = Callable[[Wanted], Model]
MOST_LOADS = 2  # that wait for the one that is under way
PAUSE_S = 5.0  # before a model that could not be loaded is tried again; each time it fails, twice as long
LONGEST_PAUSE_S = 60.0
Result = TypeVar("Result")


class Slot:
    """A model that is, will be or could be loaded. It stays in the registry when its engine is swapped."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.model: Model | None = None
        self.users = 0
        self.loading: asyncio.Future[Model] | None = None
        self.error: Exception | None = None
        self.failures = 0  # in a row
        self.try_again_at = 0.0
        self.retired = False
        self.closing = False

    @property
    def load(self) -> Load:
        wanted = self.wanted
        return Load(wanted.id, wanted.job, wanted.device, wanted.quantization)

    def failed(self, error: Exception) -> None:
        self.error = error
        self.failures += 1
        pause = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(self.failures - 1, 10))
        self.try_again_at = time.monotonic() + pause

    def info(self, default: bool) -> ModelInfo:
        if self.model is not None:
            return self.model.info.model_copy(update={"default": default})
        source = self.wanted.source
        return ModelInfo(
            id=self.wanted.id, job=self.wanted.job, default=default, quantization=self.wanted.quantization,  # type: ignore[arg-type]
            path=str(source) if isinstance(source, Path) else None,
        )  # fmt: skip


class Registry:
    """The loaded models of each job, by id; one of them is the default."""

    def __init__(
        self, options: ServeOptions, build: Build, lineups: Sequence[Lineup] = (), pools: Pools | None = None
    ) -> None:
        """`lineups`: what the other workers have by now, of the jobs in which it is not what the options say."""
        self.options = options
        self._build = build
        self._slots: dict[str, dict[str, Slot]] = {job: {} for job in JOBS}
        self._default: dict[str, str] = {}
        self._pools = pools or Pools()
        self._closing: set[asyncio.Future[None]] = set()
        self.swapping: set[asyncio.Future[Any]] = set()  # kept here, because nobody may wait for it any more
        self._swap = asyncio.Lock()
        self._loads_waiting = 0
        self._first = first_models(options)
        for wanted in self._first:
            self._slots[wanted.job][wanted.id] = Slot(wanted)
            self._default.setdefault(wanted.job, wanted.id)
        self.first = {job: self.lineup(job) for job in JOBS}
        for lineup in lineups:
            self._begin_with(lineup)

    def _begin_with(self, lineup: Lineup) -> None:
        try:
            slots = {load.model: Slot(self._wanted_as(load)) for load in lineup.models}
        except (Problem, AnytorchError) as exc:  # it is followed later, if it can be by then
            log.warning("a model loaded by the other workers was not found: %s", exc)
            return
        self._slots[lineup.job], self._default[lineup.job] = slots, lineup.default

    # --- asking ------------------------------------------------------------------------------------------------------

    def slot(self, job: str, name: str | None) -> Slot:
        """The slot a request means. Raises a 404 Problem that lists the loaded models."""
        slots = self._slots[job]
        wanted = self._default.get(job) if not name or name == "default" else name
        found = slots.get(wanted) if wanted is not None else None
        if found is None and wanted is not None:  # by the name of its publisher: sentence-transformers/all-MiniLM-L6-v2
            found = slots.get(wanted.rpartition("/")[2])
        if found is not None:
            return found
        if not slots:
            raise Problem(
                404, f"no-{job}-model", f"No {job} model is loaded", f"no {job} model is loaded", hint=HOW[job]
            )
        raise Problem(
            404, "model-not-found", "Unknown model",
            f"the model {str(name)[:200]!r} is not loaded for {job}; loaded: {', '.join(slots)}",
            hint="leave `model` out for the default one, or load it with POST /api/load-model", param="model",
        )  # fmt: skip

    async def ready(self, slot: Slot) -> Model:
        """The slot's model, loaded on first use."""
        if slot.model is not None:
            return slot.model
        if slot.error is not None and time.monotonic() < slot.try_again_at:
            raise slot.error.with_traceback(None)  # it would grow by every request that is told
        if slot.loading is None:
            slot.loading = asyncio.ensure_future(self._load(slot))
            slot.loading.add_done_callback(_seen)
        return await asyncio.shield(slot.loading)

    @contextmanager
    def use(self, slot: Slot) -> Iterator[None]:
        """Keep a slot's engine alive for a block: a swap meanwhile closes it only afterwards."""
        slot.users += 1
        try:
            yield
        finally:
            self.release(slot)

    def release(self, slot: Slot) -> None:
        slot.users -= 1
        if slot.retired and not slot.users:
            self._close(slot)

    def lineup(self, job: str) -> Lineup:
        return Lineup(job, tuple(slot.load for slot in self._slots[job].values()), self._default.get(job, ""))

    def infos(self) -> list[ModelInfo]:
        return [slot.info(self._default.get(job) == key) for job in JOBS for key, slot in self._slots[job].items()]

    def loaded(self, job: str) -> list[Model]:
        return [slot.model for slot in self._slots[job].values() if slot.model is not None]

    def slots(self, job: str) -> list[Slot]:
        return list(self._slots[job].values())

    def loadable(self) -> dict[str, Found]:
        """The models of the configured folders. Reads the disk: call it in a thread."""
        return list_models(self.options.model_folders)

    # --- loading -----------------------------------------------------------------------------------------------------

    async def _load(self, slot: Slot) -> Model:
        began = time.monotonic()
        try:
            slot.model = await self._pools.loading.run(self._build, slot.wanted)
        except ModuleNotFoundError as exc:
            missing = not_installed(slot.wanted, exc)
            slot.failed(missing)
            log.warning("%s", missing)
            raise missing from exc
        except AnytorchError as exc:
            slot.failed(exc)
            log.warning("%s cannot be loaded: %s", slot.wanted.id, exc)
            raise
        except Exception as exc:
            log.error("%s cannot be loaded: %s", slot.wanted.id, "".join(format_exception(exc)))
            problem = not_loaded(slot.wanted.id, exc)
            slot.failed(problem)
            raise problem from exc
        finally:
            slot.loading = None
        slot.error, slot.failures = None, 0
        log.info("%s %s is loaded (%.2f s)", slot.wanted.job, slot.wanted.id, time.monotonic() - began)
        if slot.retired and not slot.users:  # another took its place meanwhile
            self._close(slot)
        return slot.model

    async def load(
        self,
        name: str,
        job: str | None,
        device: str | None,
        quantization: str | None,
        done: Callable[[Slot], None] = lambda _: None,
    ) -> Slot:
        """Load a model of the configured folders, or an embedded one, and make it its job's default; then call `done`.

        It takes the place of the default before it (or of the same model with other options). Requests under way finish
        on the old engine, new ones wait for nobody: they get the old engine until the new one is ready. Once begun it is
        finished even if nobody waits for it any more: an engine that was built must have a place, or it would never be
        closed.
        """
        if self._loads_waiting >= MOST_LOADS:
            raise Problem(
                429, "load-under-way", "Another model is being loaded", f"{self._loads_waiting} more are waiting",
                hint="try again later", headers=retry_after(),
            )  # fmt: skip
        self._loads_waiting += 1
        try:
            await self._swap.acquire()
        finally:
            self._loads_waiting -= 1
        return await self._finished(self._swap_in(name, job, device, quantization, done))

    async def follow(self, choose: Callable[[], Lineup | None]) -> bool:
        """When nothing else is being loaded, bring a job's models in line with what `choose` then says; False: nothing.

        For what other workers have: whoever waits for it is not a client, so however many wait, it comes to its turn.
        """
        await self._swap.acquire()
        try:
            lineup = choose()
        except BaseException:
            self._swap.release()
            raise
        if lineup is None:
            self._swap.release()
            return False
        await self._finished(self._line_up(lineup))
        return True

    async def _finished(self, swap: Coroutine[Any, Any, Result]) -> Result:
        swapping = asyncio.ensure_future(swap)
        self.swapping.add(swapping)
        swapping.add_done_callback(self.swapping.discard)
        swapping.add_done_callback(_seen)
        return await asyncio.shield(swapping)

    async def _swap_in(
        self, name: str, job: str | None, device: str | None, quantization: str | None, done: Callable[[Slot], None]
    ) -> Slot:
        try:
            wanted = await self._pools.questions.run(self._wanted, name, job)
            slot = Slot(replace(wanted, device=device or self.options.device, quantization=quantization))
            await self.ready(slot)
            self._arrange(self.lineup(wanted.job).after(slot.load), slot)
            done(slot)
            return slot
        finally:
            self._swap.release()

    async def _line_up(self, lineup: Lineup) -> None:
        try:
            # The default first: as soon as it is here, most requests get what they would get elsewhere.
            for load in sorted(lineup.models, key=lambda load: load.model != lineup.default):
                have = self._slots[lineup.job].get(load.model)
                if have is None or have.load != load:
                    slot = Slot(await self._pools.questions.run(self._wanted_as, load))
                    await self.ready(slot)
                    self._arrange(lineup, slot)
            self._arrange(lineup)
        finally:
            self._swap.release()

    def _arrange(self, lineup: Lineup, *built: Slot) -> None:
        """Make a job's models those of the lineup, as far as they are here or in `built`; the others are let go."""
        before = self._slots[lineup.job]
        known = {**before, **{slot.wanted.id: slot for slot in built}}
        after = {load.model: known[load.model] for load in lineup.models if load.model in known}
        self._slots[lineup.job], self._default[lineup.job] = after, lineup.default
        for slot in before.values():
            if slot not in after.values():
                self._retire(slot)

    def _wanted(self, name: str, job: str | None) -> Wanted:
        """Reads the disk: call it in a thread."""
        return wanted_by(name, job, self._first, self.loadable())

    def _wanted_as(self, load: Load) -> Wanted:
        return replace(self._wanted(load.model, load.job), device=load.device, quantization=load.quantization)

    def _retire(self, slot: Slot) -> None:
        slot.retired = True
        if not slot.users:
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        if (
            slot.model is None or slot.closing
        ):  # at the end a slot is closed with requests under way, and let go of later
            return
        slot.closing = True
        task = asyncio.ensure_future(self._pools.closing.run(close_model, slot.model))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(_closed)

    async def close(self) -> None:
        """Let every engine finish its requests, then free its memory."""
        for swapping in self.swapping:
            swapping.cancel()
        for slots in self._slots.values():
            for slot in slots.values():
                if slot.model is not None and not slot.retired:
                    slot.retired = True
                    self._close(slot)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)


HOW = {
    "embeddings": "start the service with --model FOLDER",
    "forecast": "start the service without --no-forecast, or with --model FOLDER of a forecasting model",
    "text": "start the service without --no-text, or with --text-model FOLDER, or load one from a --model-folder: "
    'POST /api/load-model {"model": "…", "job": "text"}',
}


def _seen(future: asyncio.Future[Any]) -> None:
    """Mark a task's exception as seen: it was logged where it happened."""
    if not future.cancelled():
        future.exception()


def _closed(future: asyncio.Future[Any]) -> None:
    if not future.cancelled() and (exc := future.exception()) is not None:
        log.warning("a model could not be closed: %s", exc)


def close_model(model: Model) -> None:
    """Close an engine and collect what only its own references kept: on a GPU the next model may need that memory."""
    model.close()
    del model
    gc.collect()


def not_installed(wanted: Wanted, exc: ModuleNotFoundError) -> Problem:
    extra = {"forecast": "forecast", "text": "generate"}.get(wanted.job, "embed")
    return Problem(
        503, "not-installed", "A required package is not installed", f"{wanted.id} cannot be loaded: {exc}",
        hint=f"pip install 'anytorch[{extra}]'; `anytorch doctor` names the torch for this machine",
    )  # fmt: skip


def not_loaded(name: str, exc: Exception) -> Problem:
    words = f"{name} cannot be loaded: {type(exc).__name__}: {exc}"
    return Problem(503, "model-not-loaded", "The model cannot be loaded", words, hint="see the service's log")


def failure(exc: Exception) -> str:
    return exc.message if isinstance(exc, AnytorchError) else str(exc)


# --- the file that tells all workers of a service which models clients have loaded ------------------------------------

# A worker that loads a model changes the file under a lock, by the same rule by which it changed its own models; every
# worker then brings its own in line with the file. So all end with the same models, whoever loaded what at the same time.


@dataclass(frozen=True)
class Load:
    """One model, and how it is loaded."""

    model: str
    job: str
    device: str
    quantization: str | None


@dataclass(frozen=True)
class Lineup:
    """The models of one job, and the default among them ("": none)."""

    job: str
    models: tuple[Load, ...] = ()
    default: str = ""

    def after(self, load: Load) -> Lineup:
        """The lineup with another model as default; it replaces the same model with other options, else the default.

        >>> one, two = Load("one", "text", "cpu", None), Load("two", "text", "cpu", None)
        >>> [load.model for load in Lineup("text", (one, two), "one").after(Load("three", "text", "cpu", None)).models]
        ['two', 'three']
        """
        names = {one.model for one in self.models}
        gone = load.model if load.model in names else self.default
        kept = tuple(one for one in self.models if one.model != gone)
        return replace(self, models=(*kept, load), default=load.model)


class Shared:
    """The file with the models of each job that clients changed; every worker follows it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "models.json"
        self._lock = folder / "models.lock"
        self._stamp: tuple[int, int, int] | None = None
        self._newest: list[Lineup] = []

    def tell(self, load: Load, first: Lineup) -> None:
        """Record a model loaded here. `first`: the models every worker was started with for its job."""
        with self._locked():
            told = {lineup.job: lineup for lineup in self._read()}
            told[load.job] = told.get(load.job, first).after(load)
            replace_file(self._path, json.dumps([asdict(lineup) for lineup in told.values()]).encode())

    def newest(self) -> list[Lineup]:
        """The models the workers should have. Reads the file only when it has changed."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return []
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if stamp != self._stamp:
            self._newest = self._read()
            self._stamp = stamp
        return self._newest

    def _read(self) -> list[Lineup]:
        try:
            entries = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        return [Lineup(one["job"], tuple(Load(**load) for load in one["models"]), one["default"]) for one in entries]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # POSIX alone has it, and so has --workers

        with self._lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
