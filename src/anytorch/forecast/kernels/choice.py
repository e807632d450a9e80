"""Choose how each part of a step is computed: check the candidates, time them on the device, and store the result.

No table of devices could say it: on an H200 the library's product of 20 rows took 55 µs where our kernel took 95, and with
one row it was the other way round. Every way is float32, and one that is off by more than float32's rounding is never
timed. A choice is kept for the device, the versions and the shape, so that forecasts on one machine go on computing the
same digits, from the forecast on that finds them compiled; `anytorch reset --cache` forgets it, and the setting
`measure_kernels` turns measuring off.

Compiling all these kernels takes some ten seconds, so it is done beside the forecasts, which go on with torch's; only the
measuring itself, less than a second, is in a forecast's way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import Tensor

from anytorch import logs, settings
from anytorch._version import __version__
from anytorch.cache import Store
from anytorch.devices.memory import synchronize
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import CacheError
from anytorch.forecast.kernels.compiling import Compiling, Key, Task
from anytorch.recorded.graphs import Recorder

log = logs.logger(__name__)

MEASURE_S = 0.3  # for all parts of one shape, without compiling
COMPILE_S = 120.0  # what is not begun by then is not tried
ROUNDS, REPLAYS = 3, 3
# Of the answer's size. Sums of 2048 float32 products in any order stay below 1e-6; products rounded to TF32 are at 3e-4.
MOST_ERROR = 5e-6
WORTH = 0.97  # another way than the built-in one must take less than this share of its time
STORE = "forecast-kernels"
# Why a way was not timed, where it may be timed another day: such a choice is used, and not remembered.
NOT_COMPILED, NOT_MEASURED, NO_MEMORY = (
    "no time was left to compile it",
    "no time was left to measure it",
    "not enough memory",
)
NOTHING: Mapping[Key, Task] = {}


@dataclass(frozen=True)
class Option:
    """One way: `run` computes the part (for all layers), `ready` has its kernel compiled."""

    name: str
    run: Callable[[], Tensor]  # → the answer that is checked
    ready: Callable[[], None] | None = None


@dataclass(frozen=True)
class Part:
    """One part of a step with the ways to compute it, the built-in one first. `error` compares an answer with the truth."""

    name: str
    options: Sequence[Option]
    error: Callable[[Tensor], float]
    launches: int  # per `run`


@dataclass(frozen=True)
class Timed:
    name: str
    us: float | None = None  # microseconds per launch; None: not usable, wrong, or not tried
    error: float | None = None
    refused: str = ""


@dataclass(frozen=True)
class Choice:
    part: str
    way: str
    source: Literal["measured", "remembered"]
    timed: tuple[Timed, ...]

    def __str__(self) -> str:
        """With what the built-in way and torch's took; `timed` has the others."""
        took = {one.name: f"{one.us:.1f} µs" for one in self.timed if one.us is not None}
        known = dict.fromkeys((self.timed[0].name, "torch")) if self.timed else {}
        others = "".join(f"; {name} {took[name]}" for name in known if name in took and name != self.way)
        return f"{self.part}: {self.way}, {took.get(self.way, 'not timed')} ({self.source}{others})"


class Budget:
    """Seconds that may be spent."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.left, self.clock = seconds, clock

    @contextmanager
    def spend(self) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.left -= self.clock() - start


class Stopwatch:
    """Times work on a device as replays of a recording, so that starting kernels does not decide."""

    def __init__(self, device: torch.device, record: bool) -> None:
        self.device = device
        self.recorder = Recorder(device) if record else None

    def prepared(self, name: str, run: Callable[[], Tensor]) -> Callable[[], object]:
        if self.recorder is None or self.recorder.failed:
            return run
        self.recorder.record(name, run)
        recording = self.recorder.recordings.get(name)
        return run if recording is None else recording.replay

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, on the device."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(REPLAYS):
            work()
        synchronize(self.device)
        return (time.perf_counter() - start) / REPLAYS

    def clear(self) -> None:
        if self.recorder is not None:
            self.recorder.clear()


class Chooser:
    """Chooses for the parts of one shape, within one budget, when their kernels are compiled."""

    def __init__(self, device: torch.device, record: bool) -> None:
        self.device = device
        self.stopwatch = Stopwatch(device, record)
        self.measuring = Budget(MEASURE_S)
        self.compiling: Compiling | None = None

    @property
    def ready(self) -> bool:
        """Is everything compiled that was asked for?"""
        return self.compiling is not None and not self.compiling.under_way

    def choose(self, parts: Sequence[Part], *, also: Mapping[Key, Task] = NOTHING) -> dict[str, Choice] | None:
        """Part → what computes it, remembered or measured now; a part that keeps its built-in way may be missing.

        None while kernels are being compiled: ask again when it is `ready`. `also` are compiled with them.
        """
        measure = bool(settings.get("measure_kernels"))
        known = {part.name: recall(self.device, part) if measure else None for part in parts}
        if self.compiling is None:
            tasks = self._tasks(parts, known, measure)
            self.compiling = Compiling(self.device, {**tasks, **also}, COMPILE_S)
        if not self.ready:
            return None
        self.compiling.wait()
        found: dict[str, Choice] = {}
        for part in parts:
            remembered = known[part.name]
            if remembered is not None:
                found[part.name] = remembered
            elif measure:
                found[part.name] = choice = self._measure(part, self.compiling.done)
                if not any(one.refused in (NOT_COMPILED, NOT_MEASURED, NO_MEMORY) for one in choice.timed):
                    keep(self.device, choice)
                log.info("%s: %s", self.device, choice)
        return found

    def stop(self) -> None:
        """Stop compiling and drop the waiting tasks."""
        if self.compiling is not None:
            self.compiling.cancel()

    def _tasks(self, parts: Sequence[Part], known: Mapping[str, Choice | None], measure: bool) -> dict[Key, Task]:
        """What has to be compiled: all that is going to be measured; else the way that is remembered or built in."""
        tasks: dict[Key, Task] = {}
        for part, option in in_turns(parts):
            remembered = known[part.name]
            only = remembered.way if remembered is not None else "" if measure else part.options[0].name
            if option.ready is not None and only in ("", option.name):
                tasks[part.name, option.name] = option.ready
        return tasks

    def _measure(self, part: Part, compiled: set[Key]) -> Choice:
        tried = [
            self._try(part, option)
            # The built-in way is tried in any case: it is what is left.
            if place == 0 or option.ready is None or (part.name, option.name) in compiled
            else Timed(option.name, refused=NOT_COMPILED)
            for place, option in enumerate(part.options)
        ]
        ready = [
            (place, option)
            for place, (one, option) in enumerate(zip(tried, part.options, strict=True))
            if not one.refused
        ]
        with self.measuring.spend():
            seconds = self._time([option for _, option in ready])
        for (place, _), took in zip(ready, seconds, strict=True):
            if took is None:
                tried[place] = Timed(tried[place].name, refused=NOT_MEASURED)
            else:
                tried[place] = Timed(tried[place].name, round(took * 1e6 / part.launches, 2), tried[place].error)
        return Choice(part.name, decide(tried), "measured", tuple(tried))

    def _try(self, part: Part, option: Option) -> Timed:
        """Run it once: is it right?"""
        try:
            error = part.error(option.run())
        except Exception as exc:  # noqa: BLE001  (a compiler or a driver may raise anything; the reason is kept and shown)
            if is_out_of_memory(exc):
                return Timed(option.name, refused=NO_MEMORY)
            first = (str(exc).splitlines() or [""])[0][:200]
            return Timed(option.name, refused=f"{type(exc).__name__}: {first}")
        if not error <= MOST_ERROR:  # not-a-number fails, too
            return Timed(option.name, error=error, refused=f"off by {error:.2g} of the answer's size")
        return Timed(option.name, error=error)

    def _time(self, options: Sequence[Option]) -> list[float | None]:
        """The best of each, in turns, so that a busy moment hits all of them; None for what there was no time for."""
        best: list[float | None] = [None] * len(options)
        start, clock = self.measuring.clock(), self.measuring.clock
        work: list[Callable[[], object]] = []
        for number in range(ROUNDS):
            for place, option in enumerate(options):
                if clock() - start > self.measuring.left:
                    break
                if number == 0:
                    work.append(self.stopwatch.prepared(option.name, option.run))
                took = self.stopwatch.seconds(work[place]) if place < len(work) else None
                earlier = best[place]
                if took is not None:
                    best[place] = took if earlier is None else min(earlier, took)
        self.stopwatch.clear()
        return best


def in_turns(parts: Sequence[Part]) -> list[tuple[Part, Option]]:
    """The first option of every part, then the second of every part, …: what each part should not be without."""
    most = max((len(part.options) for part in parts), default=0)
    return [(part, part.options[place]) for place in range(most) for part in parts if place < len(part.options)]


def decide(timed: Sequence[Timed]) -> str:
    """The fastest; the built-in one (the first) unless another is faster by more than a measurement's noise. Pure."""
    first = timed[0]
    usable = [(one.us, one.name) for one in timed if one.us is not None]
    if not usable:
        return first.name
    us, name = min(usable)
    return first.name if first.us is not None and us > first.us * WORTH else name


# --- remembering ------------------------------------------------------------------------------------------------------


def recall(device: torch.device, part: Part) -> Choice | None:
    try:
        stored = Store(STORE).get(key_of(device, part.name))
        if stored is None:
            return None
        found = Choice(part.name, stored["way"], "remembered", tuple(Timed(**one) for one in stored["timed"]))
    except (CacheError, TypeError, KeyError) as exc:
        log.warning("the kernels are measured again: %s", exc)
        return None
    return found if found.way in [option.name for option in part.options] else None


def keep(device: torch.device, choice: Choice) -> None:
    body: dict[str, Any] = {"way": choice.way, "timed": [asdict(one) for one in choice.timed]}
    try:
        Store(STORE).put(key_of(device, choice.part), body, keep=1024)
    except CacheError as exc:
        log.warning("the measured kernels were not stored: %s", exc)


def key_of(device: torch.device, part: str) -> str:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{__version__} {device_name(device)} torch {torch.__version__} triton {triton} float32 {part}"


def device_name(device: torch.device) -> str:
    """What its vendor calls it, where torch tells; results hold for all cards of that name."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(ask(device)) if callable(ask) else str(device)
