"""The doctor: every diagnosis we can make, as pure functions over `Facts`.

diagnose(facts)   what is wrong, worst first, each finding with its fix
DIAGNOSES         all of them; one page each in docs/doctor/
explain(code)     a page's text
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from anytorch import logs
from anytorch.devices.doctor import cpu, graphics, installation, masks, nvidia, other_cards
from anytorch.devices.doctor.common import VENDOR_BACKEND, diagnosis, first_line, named, one_line, registered, report_of
from anytorch.devices.doctor.common import Diagnosis as Diagnosis
from anytorch.devices.doctor.common import Finding as Finding
from anytorch.devices.types import SEVERITY, Facts, Level, Reason
from anytorch.devices.wheels import cards_of, drivable
from anytorch.errors import UsageError, did_you_mean

# Each registers its diagnoses when imported; this is the order of the list and of the documentation's index.
GROUPS = (installation, nvidia, masks, other_cards, graphics, cpu)
log = logs.logger(__name__)


@diagnosis(
    Level.ERROR,
    "The device is there, torch finds none, and nothing else explains it",
    needs="child",
    symptom="`torch.cuda.is_available()` (or another back end's equivalent) is False, and all other checks pass.",
    evidence="A card of the back end's maker, a torch wheel built for it, a child process that counted no device, "
    "and no other error that names the back end.",
    fix="`anytorch --json doctor > doctor.json` and open an issue with it: a diagnosis is missing.",
    background="https://github.com/pytorch/pytorch/issues/85332",
)
def unexplained(facts: Facts) -> Iterator[Finding]:
    for vendor, backend in VENDOR_BACKEND.items():
        report = report_of(facts, backend)
        cards = drivable(facts.hardware, backend) or (
            () if backend in ("rocm", "xpu") else cards_of(facts.hardware, vendor)
        )
        if report is None or report.code != "no-device" or not cards:
            continue
        others = [code for code in codes() if code != "unexplained"]
        if any(reason.level is Level.ERROR and backend in reason.backends for reason in diagnose(facts, others)):
            continue
        yield Finding(
            f"{named(cards[0])} is present and torch is built for it, but torch finds no {backend} device: "
            f"{first_line(report.error)}",
            "anytorch --json doctor > doctor.json",
            report.error[:1000],
            (backend,),
        )


# Not on the list: it speaks when a diagnosis on the list fails.
DIAGNOSIS_FAILED = Diagnosis(
    "diagnosis-failed",
    Level.WARNING,
    "A diagnosis itself failed",
    lambda facts: iter(()),
    symptom="One diagnosis is missing from the doctor's report.",
    evidence="The exception that the diagnosis raised. It is a bug in anytorch; the other diagnoses are not affected.",
    fix="Open an issue with the output of `anytorch --json doctor`.",
)

_ORDER = (*(group.__name__ for group in GROUPS), __name__)
DIAGNOSES: tuple[Diagnosis, ...] = tuple(sorted(registered(), key=lambda known: _ORDER.index(known.check.__module__)))


def codes() -> tuple[str, ...]:
    return tuple(known.code for known in DIAGNOSES)


def diagnose(facts: Facts, only: Collection[str] | None = None) -> tuple[Reason, ...]:
    """Everything that is wrong, errors first. `only` names the diagnoses to make; an unknown code raises UsageError.

    A diagnosis that raises does not take the others down: it becomes a reason "diagnosis-failed".
    """
    if only is not None:
        for code in only:
            if code not in codes():
                raise _unknown(code)
    reasons: list[Reason] = []
    for known in DIAGNOSES:
        if only is None or known.code in only:
            reasons += _reasons(known, facts)
    if only is None:
        reasons += _reported(facts, reasons)
        for reason in reasons:  # not for a part: that is one diagnosis asking what the others say
            log.debug("%s: %s: %s", reason.level.value, reason.code, reason.text)
    return tuple(sorted(reasons, key=lambda reason: SEVERITY[reason.level]))


def _reasons(known: Diagnosis, facts: Facts) -> list[Reason]:
    try:
        return [
            Reason(
                known.code,
                found.level or known.level,
                one_line(found.text),
                one_line(found.fix),
                found.evidence,
                found.backends,
            )
            for found in known.check(facts)
        ]
    except Exception as exc:  # noqa: BLE001  (whatever it is, the other diagnoses must still be heard)
        text = one_line(f"the diagnosis {known.code} itself failed: {type(exc).__name__}: {first_line(str(exc))}")
        return [Reason(DIAGNOSIS_FAILED.code, Level.WARNING, text, "anytorch --json doctor", repr(exc)[:1000])]


def _reported(facts: Facts, reasons: list[Reason]) -> list[Reason]:
    """Codes that back ends reported by themselves in the child, where the diagnosis of that code has not spoken."""
    if facts.torch is None:
        return []
    by_code = {known.code: known for known in DIAGNOSES}
    spoken = {reason.code for reason in reasons}
    found = []
    for name, report in facts.torch.backends.items():
        known = by_code.get(report.code)
        if known is not None and known.code not in spoken:
            text = one_line(first_line(report.error)) or known.title
            found.append(Reason(known.code, known.level, text, command(known), report.error[:1000], (name,)))
    return found


def command(known: Diagnosis) -> str:
    """The first command that the page names, without its Markdown, so that it can be pasted."""
    parts = known.fix.split("`")
    return parts[1] if len(parts) > 2 else known.fix


def page(known: Diagnosis) -> str:
    """The diagnosis' page in docs/doctor/, in Markdown."""
    needs = "files alone" if known.needs == "files" else "a child process that tries torch"
    links = "\n".join(f"* <{link}>" for link in known.background.split())
    return (
        f"# {known.title}\n\n"
        f"`{known.code}` · {known.level.value} · found by {needs}\n\n"
        f"## What you see\n\n{known.symptom}\n\n"
        f"## What the doctor looks at\n\n{known.evidence}\n\n"
        f"## What helps\n\n{known.fix}\n" + (f"\n## Background\n\n{links}\n" if links else "")
    )


def explain(code: str) -> str:
    """The text of a diagnosis' page. Raises UsageError for a code that does not exist."""
    for known in (*DIAGNOSES, DIAGNOSIS_FAILED):
        if known.code == code:
            return page(known)
    raise _unknown(code)


def _unknown(code: str) -> UsageError:
    hint = did_you_mean(code, codes(), "`anytorch doctor` prints the codes of what it finds")
    return UsageError(f"there is no diagnosis {code!r}", hint=hint)
