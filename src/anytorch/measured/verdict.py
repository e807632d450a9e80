"""What was asked, what was tried, what was chosen: plain values, the rule that decides, and the words that explain it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from anytorch._version import __version__
from anytorch.measured.machine import machine_key
from anytorch.values import checked

FORMAT = 1  # of the stored verdicts; part of every key
WRONG = "wrong: "  # how the reason begins where an answer was not right
NO_TIME = "no time was left to measure it"
NO_MEMORY = "not enough memory for it"
OF_SIZE = "of the answer's size"  # what most errors are a share of


@lru_cache(maxsize=1)
def _this_machine() -> str:
    return machine_key()


@dataclass(frozen=True)
class Question:
    """One thing to choose. `facts` is all that the answer depends on; `kind`, `title` and `device` are for people."""

    kind: str  # "quantized product"
    title: str  # "int4 weights 1536x384, 1 row"
    device: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, title: str, device: str, **facts: Any) -> Question:
        """The question with the machine (cards, drivers, torch) and this package's version among its facts."""
        return cls(kind, title, device, {"anytorch": __version__, "machine": _this_machine(), **facts})

    @property
    def key(self) -> str:
        """32 hex digits over kind, device and facts."""
        body = json.dumps([FORMAT, self.kind, self.device, self.facts], sort_keys=True, default=str)
        return hashlib.sha256(body.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Trial:
    """What one candidate did. `seconds` is the best of its samples: other work only ever makes one slower."""

    name: str
    seconds: float | None = None  # None: not usable, wrong, or not tried
    spread_s: float = 0.0  # third quartile minus first
    repeats: int = 0
    error: float | None = None  # what the check returned
    disturbed: int = 0  # samples in which the system took the processor away
    refused: str = ""  # why it was not timed
    passing: bool = False  # … which may be different another day
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a decision needs besides the time

    @property
    def wrong(self) -> bool:
        """Whether its answer was wrong."""
        return self.refused.startswith(WRONG)

    @property
    def busy(self) -> bool:
        """Too few quiet samples: the time is that of a machine that also did something else."""
        return self.disturbed >= max(1, self.repeats)


@dataclass(frozen=True)
class Verdict:
    """The answer to a question: the chosen candidate's name ("" if none can be used), why, and every trial."""

    question: Question
    trials: tuple[Trial, ...]
    chosen: str
    why: str
    budget_s: float = 0.0  # the time there was for measuring
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    remembered: bool = False  # read from the store, not measured now
    hurried: bool = False  # it rests on other verdicts, and one of those was cut short
    most_error: float | None = None  # that was allowed; None if that is not known
    error_unit: str = OF_SIZE  # words that follow an error's number

    def trial(self, name: str) -> Trial | None:
        return next((one for one in self.trials if one.name == name), None)

    def seconds(self, name: str) -> float | None:
        found = self.trial(name)
        return None if found is None else found.seconds

    @property
    def passing(self) -> bool:
        """Whether another day could give another answer. Then it is not stored."""
        return any(one.passing for one in self.trials)

    @property
    def cut_short(self) -> bool:
        """Whether a candidate was not measured for lack of time, here or in a verdict that this one rests on."""
        return self.hurried or any(one.refused == NO_TIME for one in self.trials)

    @property
    def speedup(self) -> float | None:
        """How many times faster the choice is than the slowest right candidate; None for fewer than two."""
        timed = [one.seconds for one in self.trials if one.seconds]
        mine = self.seconds(self.chosen)
        return max(timed) / mine if mine and len(timed) > 1 else None

    def explain(self) -> str:
        """Lines for a person: the choice and why, then every candidate with its time or the reason against it."""
        source = f"measured {self.when}" + (", remembered" if self.remembered else "")
        head = f"{self.question.kind}, {self.question.title}, on {self.question.device}: "
        lines = [f"{head}{self.chosen or 'nothing'} ({self.why}; {source})"]
        erring = False
        width = max((len(one.name) for one in self.trials), default=0)
        for one in self.trials:
            reason = "not timed" if one.name == self.chosen else f"not used: {one.refused or 'not timed'}"
            said = reason if one.seconds is None else duration(one.seconds)
            wrong = ""
            if one.error and one.seconds is not None:
                wrong, erring = f", off by {self._error_in_words(one.error)}", True
            mark = "  ← chosen" if one.name == self.chosen else ""
            lines.append(f"  {one.name:<{width}}  {said}{wrong}{mark}")
        if erring and self.most_error:
            lines.append(f"  allowed: {self.most_error:.2g} {self.error_unit}")
        return "\n".join(lines)

    def _error_in_words(self, error: float) -> str:
        if self.most_error:
            return f"{100 * error / self.most_error:.2g} % of what is allowed"
        return f"{error:.1e} {self.error_unit}"

    def as_json(self) -> dict[str, Any]:
        body = asdict(self)
        del body["remembered"]
        return {"format": FORMAT, **body}

    @classmethod
    def from_json(cls, body: Any) -> Verdict:
        """The verdict that `as_json` made. Raises ValueError, TypeError or KeyError for anything else."""
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}, not {FORMAT}")
        question, trials = checked(Question(**body["question"])), tuple(checked(Trial(**one)) for one in body["trials"])
        found = cls(
            question,
            trials,
            body["chosen"],
            body["why"],
            body["budget_s"],
            body["when"],
            remembered=True,
            hurried=bool(body.get("hurried")),
            most_error=body.get("most_error"),
            error_unit=body.get("error_unit", OF_SIZE),
        )
        return checked(found)


def duration(seconds: float | None) -> str:
    """ "1.25 ms", "40 µs"; "?" if it is not known."""
    if seconds is None:
        return "?"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def fastest(trials: Sequence[Trial], *, noise: float = 0.0) -> tuple[str, str]:
    """(name, why) of the first listed trial within `noise` of the fastest; ("", why) if none was timed. Pure.

    Candidates are listed from the one to keep if in doubt (built in, plainest, smallest) to the boldest, so `noise` is how
    much a later one has to gain.
    """
    timed = [one for one in trials if one.seconds is not None]
    if not timed:
        return "", "none can be used: " + "; ".join(f"{one.name}: {one.refused}" for one in trials)
    least = min(timed, key=lambda one: one.seconds or 0.0)
    best = next(one for one in timed if (one.seconds or 0.0) <= (least.seconds or 0.0) * (1 + noise))
    took = duration(best.seconds)
    if len(timed) == 1:
        why = "the only one that could be measured" if len(trials) > 1 else "the only one"
    elif best is not least:
        why = f"{took}; {least.name}, {duration(least.seconds)}, is faster by less than {noise:.0%}"
    else:
        second = min((one for one in timed if one is not best), key=lambda one: one.seconds or 0.0)
        why = f"{took}; next is {second.name}, {duration(second.seconds)}"
    return best.name, why
