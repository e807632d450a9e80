"""The devices and the doctor's findings as the page shows them, and the latest survey of the machine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from anytorch import logs
from anytorch.devices.choose import Survey, fallbacks_to, resolve, survey
from anytorch.devices.doctor import DIAGNOSES
from anytorch.devices.ranking import choice_words, parse, reasons_absent
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate, MemoryUse, Reason, State
from anytorch.errors import AnytorchError
from anytorch.probe.activity import Activity, CardActivity
from anytorch.serve import schemas
from anytorch.serve.threads import Threads

log = logs.logger(__name__)

T = TypeVar("T")
FRESH_S = 30.0
PATIENCE_S = 1.0  # then files alone are told, and the trial goes on
PAGED = frozenset(diagnosis.code for diagnosis in DIAGNOSES)


def look(*, tried: bool, refresh: bool = False) -> Survey:
    """A survey of the machine. `tried`: compute on the devices in a child process, which may take seconds at first."""
    return survey("always" if tried else "never", refresh=refresh)


class SurveyCache:
    """The latest survey of the machine, made in a thread, one at a time: trying devices may take seconds, and answers do
    not wait for it."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._tried: tuple[float, Survey] | None = None
        self._under_way: asyncio.Future[Survey] | None = None

    async def survey(self, *, refresh: bool = False, fresh_s: float = FRESH_S) -> tuple[Survey, bool]:
        """The devices, and whether they were tried. `refresh` waits for a trial that begins now."""
        if self._tried is not None and not refresh and time.monotonic() - self._tried[0] <= fresh_s:
            return self._tried[1], True
        task = self._under_way
        if task is None:
            task = self._under_way = asyncio.ensure_future(self._try(refresh))
        done, _ = await asyncio.wait({task}, timeout=None if refresh else PATIENCE_S)
        if done:
            return task.result(), True
        if self._tried is not None:
            return self._tried[1], True
        return await self._threads.run(look, tried=False), False

    async def _try(self, refresh: bool) -> Survey:
        try:
            found = await in_background(lambda: look(tried=True, refresh=refresh))
            self._tried = (time.monotonic(), found)
            return found
        finally:
            self._under_way = None


async def in_background(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but in a daemon thread, so that stopping the service does not wait for it."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # from here on nobody can cancel it: the thread is the one who ends it

    def run() -> None:
        try:
            answer.set_result(work())
        except Exception as exc:  # noqa: BLE001  (raised again where it is awaited)
            answer.set_exception(exc)

    threading.Thread(target=run, name="anytorch-survey", daemon=True).start()
    return await asyncio.wrap_future(answer)


def devices_of(found: Survey, activity: Activity, tried: bool = True) -> schemas.Devices:
    chosen, why = choice_of(found, tried)
    cards = activity.cards()
    listed = [device_of(one, one.id == chosen, cards, activity) for one in found.devices]
    present = {one.backend for one in found.devices}
    for backend in registry().backends.values():
        if backend.name not in present:
            listed.append(absent(backend.name, backend.title, found.reasons))
    return schemas.Devices(devices=listed, choice=schemas.ChosenDevice(device=chosen, why=why), tried=tried)


def choice_of(found: Survey, tried: bool) -> tuple[str | None, str]:
    """The device a job uses when none is named, and why."""
    if not tried:
        return None, "the devices are being tried"
    try:
        with fallbacks_to(lambda message: None):  # the text is in the answer
            resolution = resolve()
    except AnytorchError as exc:
        return None, exc.message
    if resolution.fell_back:
        return resolution.chosen.id, resolution.warning
    words = choice_words(parse(resolution.requested, registry()), resolution.chosen, found.devices)
    return resolution.chosen.id, words


def device_of(one: Candidate, best: bool, cards: Mapping[str, CardActivity], activity: Activity) -> schemas.Device:
    live = live_of(one, cards, activity)
    usable = one.state is State.USABLE or (one.backend == "cpu" and one.state is not State.UNUSABLE)
    return schemas.Device(
        id=one.id,
        backend=one.backend,
        title=one.name,
        state=State.USABLE.value if usable else one.state.value,
        best=best,
        usable=usable,
        facts=list(facts_of(one)),
        memory=live.memory,
        utilisation=live.utilisation,
        reasons=[reason_of(reason) for reason in one.reasons],
    )


def absent(name: str, title: str, reasons: Sequence[Reason]) -> schemas.Device:
    """A back end without a device here, and the reason."""
    told = [reason_of(reason) for reason in reasons_absent(name, reasons)] or [
        schemas.Reason(code="not-seen", severity="note", title=f"no {title} was found here")
    ]
    return schemas.Device(id=name, backend=name, title=title, state="absent", reasons=told)


def reason_of(reason: Reason) -> schemas.Reason:
    return schemas.Reason(
        code=reason.code,
        severity=reason.level.value,
        title=reason.text,
        detail=reason.evidence,
        fix=[line for line in reason.fix.splitlines() if line.strip()],
        page=f"/v1/doctor/{reason.code}" if reason.code in PAGED else None,
    )


def facts_of(one: Candidate) -> Iterable[schemas.Fact]:
    caps = one.caps
    pairs: list[tuple[str, Any]] = [
        ("UUID", one.uuid),
        ("PCI address", one.pci),
        ("memory", f"{one.total / 2**30:.1f} GiB" if one.total else None),
        ("kind", "software" if one.software else "integrated" if one.integrated else None),
    ]
    if caps is not None:
        pairs += [
            ("fast types", ", ".join(caps.fast_dtypes)),
            ("autocast", caps.autocast_dtype),
            ("quantization", ", ".join(caps.quantizations)),
            ("bandwidth", f"{caps.peak_gb_per_s:.0f} GB/s" if caps.peak_gb_per_s else None),
            ("graphs", "yes" if caps.graphs else None),
            ("Triton", "yes" if caps.triton else None),
            ("shares the host's memory", "yes" if caps.unified_memory and one.backend != "cpu" else None),
        ]
    for label, value in pairs:
        if value:
            yield schemas.Fact(label=label, value=str(value))


# --- live ----------------------------------------------------------------------------------------------------------------


def live(found: Survey, activity: Activity) -> schemas.LiveDevices:
    """Memory and utilisation of every device of this machine."""
    cards = activity.cards()
    return schemas.LiveDevices(
        devices=[live_of(one, cards, activity) for one in found.devices if one.state is not State.UNUSABLE]
    )


def live_of(one: Candidate, cards: Mapping[str, CardActivity], activity: Activity) -> schemas.LiveDevice:
    if one.backend == "cpu":
        return schemas.LiveDevice(
            id=one.id, memory=memory_of(registry().get(one.backend).memory(one.index)), utilisation=activity.cpu_share()
        )
    card = cards.get(one.uuid or "") or cards.get(one.pci or "")
    if card is not None and card.total:
        used = schemas.Memory(used=card.used, total=card.total, source=card.source)
        return schemas.LiveDevice(id=one.id, memory=used, utilisation=card.utilisation)
    share = None if card is None else card.utilisation
    if one.state is State.UNUSABLE:
        return schemas.LiveDevice(id=one.id, utilisation=share)
    try:
        memory = memory_of(registry().get(one.backend).memory(one.index))
    except (ImportError, AnytorchError) as exc:  # seen in the system's files; what would ask it is not installed here
        log.debug("the memory of %s is not known: %s", one.id, exc)
        memory = None
    return schemas.LiveDevice(id=one.id, memory=memory, utilisation=share)


def memory_of(use: MemoryUse) -> schemas.Memory | None:
    if use.total is None and use.allocated is None:
        return None
    used = use.total - use.free if use.total is not None and use.free is not None else use.allocated
    return schemas.Memory(used=used, total=use.total, source=use.source)
