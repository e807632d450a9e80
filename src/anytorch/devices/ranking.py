"""Which device is best, and which one a request means. Pure functions over candidates; nothing is tried here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from anytorch.devices.registry import Registry
from anytorch.devices.types import SEVERITY, Candidate, Level, Reason, State
from anytorch.errors import DeviceIndexError, UnknownDevice
from anytorch.values import dataclass

PREFERRED_PRIORITY = 1000  # what prefer_npu lifts a back end to


@dataclass(frozen=True)
class DeviceRequest:
    """A parsed request: a back end with or without an index, a card's UUID, or "auto" (neither)."""

    text: str
    backend: str | None = None
    index: int | None = None
    uuid: str | None = None
    alias: str | None = None  # the word that was used, if it was not the back end's own name

    @property
    def automatic(self) -> bool:
        return self.backend is None and self.uuid is None


def parse(text: str, known: Registry) -> DeviceRequest:
    """Parse "auto", "cuda", "CUDA:1", "vulkan", "GPU-…". Raises UnknownDevice for anything else."""
    word = text.strip()
    if word.lower() in ("auto", "best", ""):
        return DeviceRequest(text)
    if re.match(r"(?i)^(GPU|MIG)-[0-9a-f]", word):
        return DeviceRequest(text, uuid=word)
    name, colon, number = word.partition(":")
    if colon and not re.fullmatch(r"[0-9]{1,4}", number):
        raise UnknownDevice(
            f"{text!r} is not a device: the part after the colon must be a number",
            hint=f"write {name.lower()}:0, or {name.lower()} for the best one",
        )
    backend = known.get(name)
    alias = None if name.lower() == backend.name else name.lower()
    return DeviceRequest(text, backend.name, int(number) if colon else None, alias=alias)


def rank(candidates: Sequence[Candidate], *, prefer: str | None = None) -> list[Candidate]:
    """Best first: usable before untried before unusable, then the order of back ends, then the better card of a kind.

    Within a kind: discrete before integrated (an integrated GPU reports system RAM as its own), no warnings before
    warnings, the one this process already uses, clearly more free memory, the one without the display, the lower index.
    """

    def score(candidate: Candidate) -> tuple[float, ...]:
        state = {State.USABLE: 2, State.SEEN: 1, State.UNUSABLE: 0}[candidate.state]
        priority = PREFERRED_PRIORITY if candidate.backend == prefer else candidate.priority
        return (
            -state,
            -priority,
            bool(candidate.integrated),
            has_warnings(candidate),
            not candidate.in_use,
            is_crowded(candidate, candidates),
            candidate.display,
            candidate.index,
        )

    return sorted(candidates, key=score)


def has_warnings(candidate: Candidate) -> bool:
    return any(reason.level is not Level.NOTE for reason in candidate.reasons)


def is_crowded(candidate: Candidate, among: Sequence[Candidate]) -> bool:
    """True if another card of its kind has clearly more free memory: over a tenth, since free memory fluctuates."""
    most = max((c.free or 0 for c in among if c.backend == candidate.backend and not c.integrated), default=0)
    return (candidate.free or 0) < 0.9 * most


def why_before(better: Candidate, worse: Candidate) -> str:
    """In words, the first criterion of `rank` that put one before the other."""
    if better.state is not worse.state:
        return f"it is {worse.state.value}"
    if worse.software and not better.software:
        return "it is a software adapter, which computes on the CPU"
    if better.priority != worse.priority:
        return f"{better.backend} comes before {worse.backend}"
    if bool(better.integrated) != bool(worse.integrated):
        return "it is integrated: discrete cards come first"
    if has_warnings(worse) and not has_warnings(better):
        return "it has warnings"
    if better.in_use and not worse.in_use:
        return "this process already uses the other one"
    if is_crowded(worse, [better, worse]):
        return f"it has less free memory ({gigabytes(worse.free)} against {gigabytes(better.free)})"
    if worse.display and not better.display:
        return "it drives the display"
    return "its index is higher"


def choice_words(request: DeviceRequest, chosen: Candidate, among: Sequence[Candidate]) -> str:
    """For the log: "cuda:0 (NVIDIA H200); not cuda:1: it has less free memory (…)"."""
    words = [f"{chosen.id} ({chosen.name})"]
    for other in among:
        if other.id != chosen.id and (request.automatic or (other.backend == chosen.backend and request.index is None)):
            words.append(f"not {other.id}: {why_before(chosen, other)}")
    return "; ".join(words)


def gigabytes(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**30:.1f} GiB"


def pick(request: DeviceRequest, candidates: Sequence[Candidate], *, prefer: str | None = None) -> Candidate | None:
    """The usable candidate a request means, or None if there is none (the caller falls back).

    Raises DeviceIndexError if the back end works and the index does not exist: that is a mistake, not a missing device.
    """
    usable = [candidate for candidate in candidates if candidate.state is State.USABLE]
    if request.automatic:
        real = [candidate for candidate in rank(usable, prefer=prefer) if not candidate.software]
        return real[0] if real else None
    if request.uuid is not None:
        wanted = request.uuid.lower()
        return next((c for c in usable if c.uuid and c.uuid.lower().startswith(wanted)), None)
    mine = [c for c in usable if c.backend == request.backend]
    if not mine and request.alias is None:
        # torch code written for "cuda" runs on ROCm by design: same torch type, so the request is met.
        mine = [c for c in usable if c.torch_type == request.backend]
    if not mine:
        return None
    if request.index is None:
        return rank(mine)[0]
    for candidate in mine:
        if candidate.index == request.index:
            return candidate
    listed = ", ".join(f"{c.id} ({c.name})" for c in sorted(mine, key=lambda c: c.index))
    raise DeviceIndexError(
        f"device {request.text!r} does not exist; available: {listed}",
        hint=f"use {request.backend} without a number for the best of them",
    )


def reasons_for(request: DeviceRequest, candidates: Sequence[Candidate], all_reasons: Sequence[Reason]) -> list[Reason]:
    """Why a request could not be met: the diagnoses that name its back end, worst first."""
    named = [r for r in all_reasons if request.backend in r.backends]
    listed = [r for c in candidates if c.backend == request.backend and c.state is not State.USABLE for r in c.reasons]
    merged = list(dict.fromkeys([*named, *listed]))
    return sorted((r for r in merged if r.level is not Level.NOTE), key=lambda r: SEVERITY[r.level])


def reasons_absent(backend: str, reasons: Sequence[Reason]) -> list[Reason]:
    """Why a back end has no device here. What keeps even the CPU from working (no torch) does not explain that."""
    return [r for r in reasons if backend in r.backends and "cpu" not in r.backends and r.level is not Level.NOTE]
