"""Candidates in, a verdict out: every answer is checked, and the right ones are timed in turns within a bound of wall time.

A candidate that raises, answers wrongly or comes too late gets its reason and no time. A drift of the machine hits all
alike, because all are sampled in turns; one that is far behind is not sampled again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from statistics import quantiles
from typing import Any

from anytorch import logs, settings
from anytorch.errors import WrongAnswer
from anytorch.measured.stopwatch import Run, Stopwatch, count_interruptions
from anytorch.measured.verdict import NO_MEMORY, NO_TIME, OF_SIZE, WRONG, Question, Trial, Verdict, fastest

log = logs.logger(__name__)

ROUNDS = 5
SAMPLE_S = 1e-3  # a sample shorter than this measures the clock and the wait, not the work
MOST_CALLS = 1000  # in one sample
HOPELESS = 2.0  # a candidate this many times slower than the best is not sampled again
ENOUGH_DISTURBED = 6  # disturbed samples after which a slow candidate is believed to be slow
SAID_AFTER_S = 1.0

Check = Callable[[Any], float]  # an answer → its error; raises WrongAnswer where no number can say it
Decide = Callable[[Sequence[Trial]], "tuple[str, str]"]  # → the name chosen, and why


@dataclass(frozen=True)
class Ready:
    """A candidate that can run. `timed` makes what is timed, where that is not `run` (the replay of a recording)."""

    run: Run  # → the answer that is checked
    timed: Callable[[], Run] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    close: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Candidate:
    """One way to do the work. It is prepared, run and timed inside `scope()`.

    `refused` says why it is not to be tried at all, `passing` that the reason may be gone another day.
    """

    name: str
    prepare: Callable[[], Ready]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    refused: str = ""
    passing: bool = False

    @classmethod
    def of(cls, name: str, run: Run, scope: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Candidate:
        return cls(name, lambda: Ready(run), scope)


def measure(
    question: Question,
    candidates: Sequence[Candidate],
    check: Check,
    *,
    most_error: float,
    stopwatch: Stopwatch | None = None,
    budget_s: float | None = None,
    rounds: int = ROUNDS,
    sample_s: float = SAMPLE_S,
    decide: Decide = fastest,
    quiet: bool = False,
    error_unit: str = OF_SIZE,
) -> Verdict:
    """Check and time the candidates and decide; nothing is stored.

    An answer is right if `check` finds an error of `most_error` at most; not-a-number is wrong. `error_unit` says what such
    a number means, in words that can follow it. `budget_s` bounds the wall
    time, by default to the setting `measure_s`: candidates are tried until one is right, and no run is interrupted. `rounds`
    samples of about `sample_s` are taken of each. Unless `quiet`, a line is logged where it takes longer than a second.
    """
    stopwatch = stopwatch or Stopwatch()
    budget = float(settings.get("measure_s")) if budget_s is None else budget_s
    contest = _Contest(check, most_error, stopwatch, stopwatch.now() + budget, sample_s, error_unit)
    entrants = [_Entrant(one, one.refused, one.passing) for one in candidates]
    with nullcontext() if quiet else _said_if_slow(question, budget):
        try:
            contest.admit(entrants)
            contest.time(entrants, rounds)
        finally:
            for one in entrants:
                one.close()
    trials = tuple(one.trial() for one in entrants)
    chosen, why = decide(trials)
    allowed = most_error if isfinite(most_error) else None
    verdict = Verdict(question, trials, chosen, why, budget, most_error=allowed, error_unit=error_unit)
    log.info("%s", verdict.explain())
    return verdict


@dataclass
class _Entrant:
    candidate: Candidate
    refused: str = ""
    passing: bool = False
    ready: Ready | None = None
    timed: Run | None = None
    error: float | None = None
    calls: int = 1  # per sample
    samples: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)

    def trial(self) -> Trial:
        facts = self.ready.facts if self.ready is not None else {}
        shown = self.error if self.error is not None and self.error == self.error else None  # NaN is no number in JSON
        if not self.samples:
            return Trial(self.candidate.name, error=shown, refused=self.refused, passing=self.passing, facts=facts)
        kept = self.quiet or self.samples
        spread = 0.0
        if len(kept) > 1:
            low, _, high = quantiles(kept, n=4, method="inclusive")
            spread = high - low
        disturbed = len(self.samples) - len(self.quiet)
        return Trial(self.candidate.name, min(kept), spread, len(kept), shown, disturbed, facts=facts)

    def hopeless(self, best: float) -> bool:
        """Slower than the best by far, and not merely because other work got in its way, or the device was not awake."""
        if min(self.samples) <= HOPELESS * best:
            return False
        known = (bool(self.quiet) and len(self.samples) > 1) or len(self.samples) >= ENOUGH_DISTURBED
        return known or min(self.samples) > 10 * HOPELESS * best

    def close(self) -> None:
        if self.timed is not None or self.ready is not None:
            ready, self.timed = self.ready, None
            if ready is not None:
                ready.close()
                self.ready = Ready(_closed, facts=ready.facts)


def _closed() -> None:
    raise AssertionError("this candidate has been closed")


@dataclass
class _Contest:
    check: Check
    most_error: float
    stopwatch: Stopwatch
    deadline: float
    sample_s: float
    error_unit: str

    def admit(self, entrants: Sequence[_Entrant]) -> None:
        """Check each one's answer, which warms it up, then take one sample: so the last one measured is warm, too."""
        expected = 0.0  # what two runs of the first that was right take: no other is begun that would end too late
        for one in entrants:
            if one.refused:
                continue
            if expected and self.stopwatch.now() + expected > self.deadline:
                one.refused = NO_TIME
                continue
            self._try(one)
            if not one.refused:
                expected = expected or max(2 * one.samples[0], 1e-9)

    def _try(self, one: _Entrant) -> None:
        try:
            with one.candidate.scope():
                one.ready = one.candidate.prepare()
                one.error = self.check(one.ready.run())
                if not one.error <= self.most_error:
                    raise WrongAnswer(f"off by {one.error:.2g} {self.error_unit}; {self.most_error:.2g} is allowed")
                one.timed = one.ready.run if one.ready.timed is None else one.ready.timed()
                self._sample(one)
        except WrongAnswer as exc:
            one.refused = f"{WRONG}{exc.message}"
        except Exception as exc:  # noqa: BLE001  (a library, a compiler or a driver may raise anything; the reason is kept)
            if self.stopwatch.is_passing(exc):
                one.refused, one.passing = NO_MEMORY, True
            else:
                first = (str(exc).strip().splitlines() or [""])[0][:200]
                one.refused = f"{type(exc).__name__}: {first}"
        if one.refused:
            log.info("%s is not used: %s", one.candidate.name, one.refused)
            one.samples.clear()
            one.quiet.clear()
            one.close()

    def time(self, entrants: Sequence[_Entrant], rounds: int) -> None:
        alive = [one for one in entrants if one.timed is not None]
        for _ in range(rounds - 1):
            best = min((min(one.samples) for one in alive), default=0.0)
            for one in [one for one in alive if one.hopeless(best)]:
                alive.remove(one)
                one.close()
            if len(alive) < 2:
                return  # there is nothing to compare it with
            for one in alive:
                if self.stopwatch.now() + max(min(one.samples), self.sample_s) > self.deadline:
                    return
                with one.candidate.scope():
                    if min(one.samples) < self.sample_s and one.candidate.scope is not nullcontext:
                        self.stopwatch.seconds(_timed(one), 1)  # the switch is not free: threads start, caches change
                    self._sample(one)

    def _sample(self, one: _Entrant) -> None:
        if one.samples:
            one.calls = max(1, min(MOST_CALLS, round(self.sample_s / max(min(one.samples), 1e-9))))
        interruptions = count_interruptions()
        one.samples.append(self.stopwatch.seconds(_timed(one), one.calls))
        if count_interruptions() == interruptions:
            one.quiet.append(one.samples[-1])


def _timed(one: _Entrant) -> Run:
    assert one.timed is not None
    return one.timed


@contextmanager
def _said_if_slow(question: Question, budget_s: float) -> Iterator[None]:
    """A line that says what is being measured, if it takes longer than a second."""
    words = "measuring what is fastest on %s: %s, %s (at most about %.3g s, then it is remembered)"
    timer = threading.Timer(
        SAID_AFTER_S, log.warning, (words, question.device, question.kind, question.title, budget_s)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
