"""The models of the service: which are loaded, which is meant, and how one takes another's place without a lost request.

All of it happens on the event loop's thread, so that no lock is needed; only building an engine, which takes seconds, is
done in a thread. Requests hold their model while they use it (`use`), and a model that was replaced is closed when the
last of them lets go.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from traceback import format_exception
from typing import Any

from anytorch import logs
from anytorch.engines.embed.locate import DEFAULT_MODEL, find_model
from anytorch.errors import AnytorchError, ModelError, UsageError
from anytorch.serve.folders import Found, job_of, list_models, require
from anytorch.serve.loaders import Model, Wanted
from anytorch.serve.options import ServeOptions
from anytorch.serve.problems import Problem, retry_after
from anytorch.serve.schemas import ModelInfo

log = logs.logger(__name__)

JOBS = ("embeddings", "forecast", "text")
EMBEDDED = {"embeddings": DEFAULT_MODEL.partition("/")[2], "forecast": "tiny"}
Build = Callable[[Wanted], Model]
MOST_LOADS = 2  # that wait for the one that is under way
PAUSE_S = 5.0  # before a model that could not be loaded is tried again


class Slot:
    """A model that is, will be or could be loaded. Its place in the registry stays when its engine is swapped."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.model: Model | None = None
        self.users = 0
        self.loading: asyncio.Future[Model] | None = None
        self.error: Exception | None = None
        self.try_again_at = 0.0
        self.retired = False

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

    def __init__(self, options: ServeOptions, build: Build) -> None:
        self.options = options
        self._build = build
        self._slots: dict[str, dict[str, Slot]] = {job: {} for job in JOBS}
        self._default: dict[str, str] = {}
        # One at a time: two engines that are built at once would both measure a busy machine.
        self._builder = ThreadPoolExecutor(1, "anytorch-load")
        self._closing: set[asyncio.Future[None]] = set()
        self.swapping: set[asyncio.Future[Slot]] = set()  # kept here, because nobody may wait for it any more
        self._swap = asyncio.Lock()
        self._loads_waiting = 0
        self._first = first_models(options)
        for wanted in self._first:
            self._slots[wanted.job][wanted.id] = Slot(wanted)
            self._default.setdefault(wanted.job, wanted.id)

    # --- asking ------------------------------------------------------------------------------------------------------

    def slot(self, job: str, name: str | None) -> Slot:
        """The slot a request means. Raises a 404 Problem that says what there is."""
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
            404, "model-not-found", "There is no such model",
            f"the model {str(name)[:200]!r} is not loaded for {job}; loaded: {', '.join(slots)}",
            hint="leave `model` out for the default one, or load it with POST /api/load-model", param="model",
        )  # fmt: skip

    async def ready(self, slot: Slot) -> Model:
        """The slot's model, loaded if it is not yet."""
        if slot.model is not None:
            return slot.model
        if slot.error is not None and time.monotonic() < slot.try_again_at:
            raise slot.error
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

    def default(self, job: str) -> Slot | None:
        return self._slots[job].get(self._default.get(job, ""))

    def infos(self, job: str | None = None) -> list[ModelInfo]:
        return [
            slot.info(self._default.get(name) == key)
            for name in JOBS
            if job in (None, name)
            for key, slot in self._slots[name].items()
        ]

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
            slot.model = await asyncio.get_running_loop().run_in_executor(self._builder, self._build, slot.wanted)
            slot.error = None
        except ModuleNotFoundError as exc:
            slot.error, slot.try_again_at = not_installed(slot.wanted, exc), time.monotonic() + PAUSE_S
            log.warning("%s", slot.error)
            raise slot.error from exc
        except AnytorchError as exc:
            slot.error, slot.try_again_at = exc, time.monotonic() + PAUSE_S
            raise
        except Exception as exc:
            log.error("%s cannot be loaded: %s", slot.wanted.id, "".join(format_exception(exc)))
            slot.error, slot.try_again_at = not_loaded(slot.wanted.id, exc), time.monotonic() + PAUSE_S
            raise slot.error from exc
        finally:
            slot.loading = None
        log.info("%s %s is loaded (%.2f s)", slot.wanted.job, slot.wanted.id, time.monotonic() - began)
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
                429, "load-under-way", "Another model is being loaded", f"{self._loads_waiting} more wait already",
                hint="try again later", headers=retry_after(),
            )  # fmt: skip
        self._loads_waiting += 1
        try:
            await self._swap.acquire()
        finally:
            self._loads_waiting -= 1
        return await self._finished(self._swap_in(name, job, device, quantization, done))

    async def follow(self, choose: Callable[[], tuple[str, str, str, str | None] | None]) -> bool:
        """When nothing else is being loaded, load what `choose` then names, as `load` does; False: it names nothing.

        For what other workers have: whoever waits for it is not a client, so however many wait, it comes to its turn.
        """
        await self._swap.acquire()
        try:
            asked = choose()
        except BaseException:
            self._swap.release()
            raise
        if asked is None:
            self._swap.release()
            return False
        await self._finished(self._swap_in(*asked, lambda _: None))
        return True

    async def _finished(self, swap: Coroutine[Any, Any, Slot]) -> Slot:
        swapping = asyncio.ensure_future(swap)
        self.swapping.add(swapping)
        swapping.add_done_callback(self.swapping.discard)
        swapping.add_done_callback(_seen)
        return await asyncio.shield(swapping)

    async def _swap_in(
        self, name: str, job: str | None, device: str | None, quantization: str | None, done: Callable[[Slot], None]
    ) -> Slot:
        try:
            wanted = await asyncio.to_thread(self._wanted, name, job)
            wanted = Wanted(wanted.id, wanted.job, wanted.source, device or self.options.device, quantization)
            slot = Slot(wanted)
            await self.ready(slot)
            slots = self._slots[wanted.job]
            old = slots.pop(wanted.id, None) or slots.pop(self._default.get(wanted.job, ""), None)
            slots[wanted.id] = slot
            self._default[wanted.job] = wanted.id
            if old is not None:
                self._retire(old)
            done(slot)
            return slot
        finally:
            self._swap.release()

    def _wanted(self, name: str, job: str | None) -> Wanted:
        for kind, embedded in EMBEDDED.items():
            if name == embedded and job in (None, kind):
                return Wanted(embedded, kind, None)
        for wanted in self._first:  # named on the command line
            if name == wanted.id and job in (None, wanted.job):
                return wanted
        known = self.loadable()
        found = known.get(name)
        if found is not None and job not in (None, found.job):
            raise Problem(
                404, "wrong-job", "The model is for another job",
                f"{name[:200]!r} is a model for {found.job}, and {job} was asked for",
                hint="leave `job` out: the model's files say what it is for", param="job",
            )  # fmt: skip
        if found is None:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            raise Problem(
                404, "model-not-found", "There is no such model",
                f"{name[:200]!r} is not in the model folders",
                hint=f"did you mean {near[0]!r}?" if near else "GET /api/models lists what can be loaded; "
                "folders are named with --model-folder",
                param="model",
            )  # fmt: skip
        return Wanted(found.id, found.job, require(found))

    def _retire(self, slot: Slot) -> None:
        slot.retired = True
        if not slot.users:
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        if slot.model is None:
            return
        task = asyncio.ensure_future(asyncio.to_thread(close_model, slot.model))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        task.add_done_callback(_seen)

    async def close(self) -> None:
        """Let every engine finish what it has, then give its memory back."""
        for swapping in self.swapping:
            swapping.cancel()
        for slots in self._slots.values():
            for slot in slots.values():
                if slot.model is not None and not slot.retired:
                    slot.retired = True
                    self._close(slot)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        self._builder.shutdown(wait=False, cancel_futures=True)


HOW = {
    "embeddings": "start the service with --model FOLDER",
    "forecast": "start the service without --no-forecast, or with --model FOLDER of a forecasting model",
    "text": "start the service with --text-model FOLDER, or load one from a --model-folder: "
    'POST /api/load-model {"model": "…", "job": "text"}',
}


def _seen(future: asyncio.Future[Any]) -> None:
    """A failure that nobody waited for is logged once, and not reported as lost by asyncio."""
    if not future.cancelled() and (exc := future.exception()) is not None:
        log.warning("a model could not be loaded or closed: %s", exc)


def first_models(options: ServeOptions) -> list[Wanted]:
    """What the command line asks for: named models, else the embedded ones. Raises ModelError where one cannot be."""
    wanted: list[Wanted] = []
    for name in options.models:
        wanted.append(_named(name, options))
    if options.text_model is not None:
        wanted.append(Wanted(Path(options.text_model).name, "text", _folder(options.text_model), options.device))
    jobs = {one.job for one in wanted}
    if "embeddings" not in jobs and not (jobs - {"text"}):
        wanted.append(Wanted(EMBEDDED["embeddings"], "embeddings", None, options.device, options.quantization))
    if "forecast" not in jobs and options.forecast:
        wanted.append(Wanted(EMBEDDED["forecast"], "forecast", None, options.device))
    return wanted


def _named(name: str, options: ServeOptions) -> Wanted:
    if name in (EMBEDDED["embeddings"], DEFAULT_MODEL):
        return Wanted(EMBEDDED["embeddings"], "embeddings", None, options.device, options.quantization)
    if name == EMBEDDED["forecast"] or name.lower().startswith("kronos-"):
        return Wanted(name.lower(), "forecast", None if name == EMBEDDED["forecast"] else name, options.device)
    path, title = Path(name).expanduser(), name.rpartition("/")[2]
    if path.is_dir():
        title = path.resolve().name
    else:
        path = find_model(name)  # of the Hugging Face Hub; says what to do where there is none
    job = job_of(path)
    if job is None:
        raise ModelError(f"{path}: its config.json does not say what it is", hint="name a model's folder")
    return Wanted(title, job, path, options.device, options.quantization if job == "embeddings" else None)


def _folder(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise UsageError(f"--text-model {name}: there is no such folder")
    return path


def close_model(model: Model) -> None:
    """Close an engine and collect what only its own references kept: on a GPU the next model may need that memory."""
    model.close()
    del model
    gc.collect()


def not_installed(wanted: Wanted, exc: ModuleNotFoundError) -> Problem:
    extra = {"forecast": "forecast", "text": "generate"}.get(wanted.job, "embed")
    return Problem(
        503, "not-installed", "Something this needs is not installed", f"{wanted.id} cannot be loaded: {exc}",
        hint=f"pip install 'anytorch[{extra}]'; `anytorch doctor` names the torch for this machine",
    )  # fmt: skip


def not_loaded(name: str, exc: Exception) -> Problem:
    words = f"{name} cannot be loaded: {type(exc).__name__}: {exc}"
    return Problem(503, "model-not-loaded", "The model cannot be loaded", words, hint="the service's log has more")


def failure(exc: Exception) -> str:
    return exc.message if isinstance(exc, AnytorchError) else str(exc)
