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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from anytorch import settings
from anytorch.devices.stopwatch import on_device, stopwatch_of
from anytorch.measured.compiling import Compiling, Key, Task
from anytorch.measured.engine import Candidate, Ready, measure
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question, Trial, Verdict, fastest
from anytorch.recorded.graphs import Recorder

MEASURE_S = 1.5  # for all parts of one shape, without compiling
COMPILE_S = 120.0  # what is not begun by then is not tried
ROUNDS, SAMPLE_S = 3, 1e-3
# Of the answer's size. Sums of 2048 float32 products in any order stay below 1e-6; products rounded to TF32 are at 3e-4.
MOST_ERROR = 5e-6
NOISE = 0.03  # another way than the built-in one must gain more than this share
NOT_COMPILED = "no time was left to compile it"
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


class Chooser:
    """Chooses for the parts of one shape, within one budget, when their kernels are compiled."""

    def __init__(self, device: torch.device, record: bool) -> None:
        self.device = device
        self.recorder = Recorder(device) if record else None
        self.left_s = MEASURE_S
        self.compiling: Compiling | None = None

    @property
    def ready(self) -> bool:
        """Whether everything that was requested is compiled."""
        return self.compiling is not None and not self.compiling.under_way

    def choose(self, parts: Sequence[Part], *, also: Mapping[Key, Task] = NOTHING) -> dict[str, Verdict] | None:
        """Part → what computes it, remembered or measured now; a part that keeps its built-in way may be missing.

        None while kernels are being compiled: ask again when it is `ready`. `also` are compiled with them.
        """
        may_measure = bool(settings.get("measure_kernels"))
        known = {part.name: self._recall(part) if may_measure else None for part in parts}
        if self.compiling is None:
            tasks = self._tasks(parts, known, may_measure)
            self.compiling = Compiling({**tasks, **also}, COMPILE_S, partial(on_device, self.device))
        if not self.ready:
            return None
        self.compiling.wait()
        found: dict[str, Verdict] = {}
        for part in parts:
            verdict = known[part.name]
            if verdict is None and may_measure:
                verdict = self._measure(part, self.compiling.done)
                if not verdict.passing and not verdict.cut_short:  # else it is used, and found out another day
                    remember(verdict)
            if verdict is not None:
                found[part.name] = verdict
        return found

    def stop(self) -> None:
        """Stop compiling and drop the waiting tasks."""
        if self.compiling is not None:
            self.compiling.cancel()

    def _tasks(self, parts: Sequence[Part], known: Mapping[str, Verdict | None], may_measure: bool) -> dict[Key, Task]:
        """What has to be compiled: all that is going to be measured; else the way that is remembered or built in."""
        tasks: dict[Key, Task] = {}
        for part, option in in_turns(parts):
            remembered = known[part.name]
            only = remembered.chosen if remembered is not None else "" if may_measure else part.options[0].name
            if option.ready is not None and only in ("", option.name):
                tasks[part.name, option.name] = option.ready
        return tasks

    def _recall(self, part: Part) -> Verdict | None:
        return recall(question(self.device, part.name), names=[option.name for option in part.options])

    def _measure(self, part: Part, compiled: set[Key]) -> Verdict:
        watch = stopwatch_of(self.device)
        began = watch.now()
        try:
            return measure(
                question(self.device, part.name),
                [self._candidate(part, place, compiled) for place in range(len(part.options))],
                part.error,
                most_error=MOST_ERROR,
                stopwatch=replace(watch, seconds=lambda run, count: watch.seconds(run, count) / part.launches),
                budget_s=self.left_s,
                rounds=ROUNDS,
                sample_s=SAMPLE_S / part.launches,
                decide=decide,
                quiet=True,
            )
        finally:
            self.left_s = max(0.0, self.left_s - (watch.now() - began))
            if self.recorder is not None:
                self.recorder.clear()

    def _candidate(self, part: Part, place: int, compiled: set[Key]) -> Candidate:
        option = part.options[place]
        # The built-in way is tried in any case: it is what is left.
        missing = place > 0 and option.ready is not None and (part.name, option.name) not in compiled
        ready = Ready(option.run, partial(self._replayed, option))
        return Candidate(option.name, lambda: ready, refused=NOT_COMPILED if missing else "", passing=missing)

    def _replayed(self, option: Option) -> Callable[[], object]:
        """What is timed: the replay of a recording, so that starting kernels does not decide."""
        if self.recorder is None or self.recorder.failed:
            return option.run
        self.recorder.record(option.name, option.run)
        recording = self.recorder.recordings.get(option.name)
        return option.run if recording is None else recording.replay


def decide(trials: Sequence[Trial]) -> tuple[str, str]:
    """The fastest; the built-in one (the first) unless another is faster by more than a measurement's noise. Pure."""
    name, why = fastest(trials, noise=NOISE)
    return name or trials[0].name, why


def told(verdict: Verdict) -> str:
    """One line: what was chosen, with what the built-in way and torch's took; the verdict has the others. Pure."""
    took = {one.name: f"{one.seconds * 1e6:.1f} µs" for one in verdict.trials if one.seconds is not None}
    known = dict.fromkeys((verdict.trials[0].name, "torch")) if verdict.trials else {}
    others = "".join(f"; {name} {took[name]}" for name in known if name in took and name != verdict.chosen)
    source = "remembered" if verdict.remembered else "measured"
    return f"{verdict.question.title}: {verdict.chosen}, {took.get(verdict.chosen, 'not timed')} ({source}{others})"


def in_turns(parts: Sequence[Part]) -> list[tuple[Part, Option]]:
    """The first option of every part, then the second of every part, …: what each part should not be without."""
    most = max((len(part.options) for part in parts), default=0)
    return [(part, part.options[place]) for place in range(most) for part in parts if place < len(part.options)]


def question(device: torch.device, part: str) -> Question:
    """What a choice depends on."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return Question.of(
        "forecast kernel", part, device_name(device), part=part, torch=torch.__version__, triton=triton, dtype="float32"
    )


def device_name(device: torch.device) -> str:
    """What its vendor calls it, where torch tells; results hold for all cards of that name."""
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(ask(device)) if callable(ask) else str(device)
