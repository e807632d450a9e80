"""What a diagnosis is, and the list of all of them.

A diagnosis is one small pure function over `Facts` that yields `Finding`s. `@diagnosis(...)` puts it on the list
together with the text of its page (docs/doctor/<code>.md is written from it), so that code and page cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from anytorch.devices.types import Facts, Level
from anytorch.values import dataclass

Needs = Literal["files", "child"]


class Finding(NamedTuple):
    """One thing that is wrong. `level` is only given where it differs from the diagnosis' own."""

    text: str  # one sentence with the facts in it
    fix: str = ""  # what to type
    evidence: str = ""
    backends: tuple[str, ...] = ()
    level: Level | None = None


Check = Callable[[Facts], Iterator[Finding]]


@dataclass(frozen=True)
class Diagnosis:
    code: str
    number: int | None  # in the table of the research page; None: not in that table
    level: Level
    title: str
    needs: Needs  # "files": the probe alone can tell; "child": torch must have been tried
    check: Check
    symptom: str  # what the user sees, verbatim where a message is known
    evidence: str  # what we look at
    fix: str  # the command, in general terms
    background: tuple[str, ...] = ()  # links


_registered: dict[str, Diagnosis] = {}


def diagnosis(
    code: str,
    level: Level,
    title: str,
    *,
    needs: Needs = "files",
    number: int | None = None,
    symptom: str,
    evidence: str,
    fix: str,
    background: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Put a check on the list. The order of the list is the order of registration."""

    def register(check: Check) -> Check:
        if code in _registered:
            raise ValueError(f"two diagnoses are called {code!r}")
        _registered[code] = Diagnosis(code, number, level, title, needs, check, symptom, evidence, fix, background)
        return check

    return register


def registered() -> tuple[Diagnosis, ...]:
    return tuple(_registered.values())
