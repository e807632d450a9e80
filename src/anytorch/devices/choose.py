"""Finding, choosing and explaining devices: the questions a person or a job asks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from anytorch import logs, settings
from anytorch.devices.gather import Survey as Survey
from anytorch.devices.gather import Tried
from anytorch.devices.gather import survey as survey
from anytorch.devices.ranking import (
    DeviceRequest,
    choice_words,
    gigabytes,
    parse,
    pick,
    rank,
    reasons_absent,
    reasons_for,
    why_before,
)
from anytorch.devices.registry import by_torch_type, current_index, registry
from anytorch.devices.types import Backend, Candidate, Level, Reason, State
from anytorch.devices.wheels import advise
from anytorch.errors import DeviceFallbackWarning, DeviceUnavailable, TorchMissing, UsageError

if TYPE_CHECKING:
    import torch

log = logs.logger(__name__)


@dataclass(frozen=True)
class Resolution:
    """The device chosen for a request. `.device` is a plain `torch.device`; the rest says why it is that one."""

    requested: str
    chosen: Candidate
    fell_back: bool = False
    reasons: tuple[Reason, ...] = ()
    warning: str = ""  # the text of the DeviceFallbackWarning, "" when the request was met

    @property
    def device(self) -> torch.device:
        activate(self.chosen)
        import torch

        return torch.device(self.chosen.torch_name)

    @property
    def name(self) -> str:
        """The device's name for torch ("cuda:0"), without importing torch."""
        return self.chosen.torch_name


def devices(*, tried: Tried = "always", refresh: bool = False) -> list[Candidate]:
    """Every device, best first, with its state, facts and reasons.

    `tried="always"` uses each one in a child process (cached); "never" answers from files alone.
    """
    return list(survey(tried, refresh=refresh).devices)


def best_device(*, prefer_npu: bool = False) -> torch.device:
    """The device to use: the configured one if `anytorch set` or ANYTORCH_BACKEND names one, else the best.

    The order is CUDA/ROCm > NPU > XPU > MPS > WebGPU on a real GPU > CPU; `prefer_npu` asks for an NPU first, whatever is
    configured.
    """
    return resolve("auto" if prefer_npu else None, prefer_npu=prefer_npu).device


def resolve(
    request: str | torch.device | None = None,
    *,
    strict: bool | None = None,
    prefer_npu: bool = False,
    fallback: Literal["cpu", "best"] = "cpu",
) -> Resolution:
    """Turn a request ("auto", "cuda:1", "vulkan", a UUID, a torch.device, None for the configured one) into a device.

    A named device that is not usable falls back to the CPU with a DeviceFallbackWarning that says why; with
    `strict=True` (or ANYTORCH_STRICT=1) it raises DeviceUnavailable instead. An unknown name raises UnknownDevice and
    an index that does not exist DeviceIndexError, always.
    """
    if fallback not in ("cpu", "best"):
        raise UsageError(f"fallback={fallback!r}: use 'cpu' or 'best'")
    text, from_settings = (words_of(request), "") if request is not None else configured_request()
    strict = bool(settings.get("strict")) if strict is None else strict
    wanted, found, listed, chosen = _look(text, prefer="npu" if prefer_npu else None)
    if found.facts.hardware.torch is None:
        advice = advise(found.facts.hardware)
        raise TorchMissing(f"torch is not installed in {found.facts.hardware.machine.executable}", hint=advice.command)
    if chosen is not None:
        log.debug("asked for %r, chose %s", text, choice_words(wanted, chosen, listed))
        return Resolution(text, chosen)
    reasons = tuple(reasons_for(wanted, listed, found.reasons))
    why = why_not(wanted, listed, reasons)
    if strict:
        raise DeviceUnavailable(
            f"device {text!r} cannot be used: {why}",
            hint=next((r.fix for r in reasons if r.fix), "run `anytorch doctor`"),
            reasons=[r.code for r in reasons],
        )
    usable_cpu = [as_usable(c) for c in listed if c.backend == "cpu"]
    instead = pick(parse("auto", registry()), listed) if fallback == "best" else None
    instead = instead or usable_cpu[0]
    origin = f" (from {from_settings})" if from_settings else ""
    warning = f"device {text!r}{origin} cannot be used: {why}. Using {instead.id} ({instead.name}) instead."
    log.info("%s", warning)
    warn_fallback(warning, [r.code for r in reasons])
    return Resolution(text, instead, True, reasons, warning)


def _look(text: str, prefer: str | None = None) -> tuple[DeviceRequest, Survey, list[Candidate], Candidate | None]:
    """What a request means, the survey made for it, the devices listed, and the usable one it means, if any."""
    wanted = parse(text, registry())
    # The CPU needs no trying: `resolve("cpu")` must answer at once on any machine.
    asks_for_cpu = wanted.backend == "cpu"
    found = survey("never" if asks_for_cpu else "needed", wanted=wanted.backend)
    listed = [as_usable(c) if asks_for_cpu and c.backend == "cpu" else c for c in found.devices]
    chosen = pick(wanted, listed, prefer=prefer) if found.facts.hardware.torch is not None else None
    return wanted, found, listed, chosen


def words_of(request: str | torch.device) -> str:
    """A request as text. torch.device("cuda") is the current card, as in torch; "cuda" is the best one."""
    text = str(request)
    kind = getattr(request, "type", None)  # of a torch.device; whatever else is not a text is no device's name
    index = None if kind is None or ":" in text else current_index(by_torch_type(kind))
    return text if index is None else f"{text}:{index}"


_fallbacks: ContextVar[Callable[[str], None] | None] = ContextVar("fallbacks", default=None)


@contextmanager
def fallbacks_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Within the block, in this thread or task, `tell` gets the text of each fallback instead of a DeviceFallbackWarning.

    For services: `warnings.catch_warnings` changes the whole process, and threads whose blocks overlap leave it changed.
    """
    token = _fallbacks.set(tell)
    try:
        yield
    finally:
        _fallbacks.reset(token)


def warn_fallback(message: str, reasons: Sequence[str] = ()) -> None:
    """Issue a DeviceFallbackWarning that points at the user's code, or pass it to the function given to `fallbacks_to`."""
    tell = _fallbacks.get()
    if tell is not None:
        tell(message)
    else:
        warnings.warn(DeviceFallbackWarning(message, reasons), stacklevel=callers_level())


def callers_level() -> int:
    """The number of frames up to the user's own code, so that a warning points there."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("anytorch.", "anytorch_compat.")
    ):
        level, frame = level + 1, frame.f_back
    return level


def configured_request() -> tuple[str, str]:
    """The configured request and where it came from ("" for the default). A stored card is named by its UUID."""
    value = settings.lookup("backend")
    if value.source == "default":
        return "auto", ""
    uuid = settings.get("device_uuid") if value.source == "file" else ""
    return (uuid or str(value.value)), value.source


def why_not(request: DeviceRequest, listed: Sequence[Candidate], reasons: Sequence[Reason]) -> str:
    if reasons:
        return "; ".join(reason.text.rstrip(".") for reason in reasons[:2])
    if request.uuid is not None:
        return "no usable card has that UUID"
    if request.automatic:
        return "no device could be used"
    title = registry().get(request.backend or "").title
    if any(candidate.backend == request.backend for candidate in listed):
        return f"the {title} did not work when tried"
    return f"no {title} was found on this machine"


def as_usable(candidate: Candidate) -> Candidate:
    """The candidate as usable: the CPU works wherever torch does, and is the only device used untested."""
    return replace(candidate, state=State.USABLE)


def activate(candidate: Candidate) -> None:
    """Make torch know a device type that lives in a module of its own; a no-op for torch's built-in types."""
    _activate(registry().get(candidate.backend))


def _activate(backend: Backend) -> None:
    function: Any = getattr(backend, "activate", None)
    if callable(function):
        function()


def enable(name: str) -> torch.device:
    """Make torch know a device that lives in a module of its own (`anytorch.enable("webgpu")`), and return it.

    It is not tried; `resolve` does that. Raises UnknownDevice, or what the module raises.
    """
    backend = registry().get(name)
    _activate(backend)
    import torch

    return torch.device(backend.torch_type)


def explain(request: str | None = None, *, prefer_npu: bool = False, tried: Tried = "always") -> str:
    """Explain in words which device would be chosen, and why each other device and back end would not."""
    text = configured_request()[0] if request is None else request
    wanted = parse(text, registry())
    found = survey(tried)
    listed = rank(found.devices, prefer="npu" if prefer_npu else None)
    if tried == "never":
        listed = [as_usable(c) if c.state is State.SEEN else c for c in listed]
    chosen = pick(wanted, listed, prefer="npu" if prefer_npu else None) if found.facts.hardware.torch else None
    lines = [f"you asked for: {text}"]
    if chosen is None:
        about = reasons_for(wanted, listed, found.reasons)
        lines.append(f"chosen: nothing matches, because {why_not(wanted, listed, about)}")
    else:
        state = State.SEEN if tried == "never" else chosen.state
        lines.append(f"chosen: {chosen.id}, {chosen.name} ({state.value}, {gigabytes(chosen.free)} free)")
    for candidate in listed:
        if candidate is chosen:
            continue
        if candidate.state is State.UNUSABLE:
            errors = [r.text for r in candidate.reasons if r.level is Level.ERROR]
            why = "; ".join(errors or [r.text for r in candidate.reasons]) or "it did not work when tried"
            fix = next((r.fix for r in candidate.reasons if r.fix), "")
            lines.append(f"not {candidate.id}, {candidate.name}: {why}" + (f"\n    fix: {fix}" if fix else ""))
        elif chosen is not None and wanted.automatic:
            lines.append(f"not {candidate.id}, {candidate.name}: {why_before(chosen, candidate)}")
        else:
            lines.append(f"not {candidate.id}, {candidate.name}: you did not ask for it")
    present = {candidate.backend for candidate in listed}
    for backend in registry().backends.values():
        if backend.name not in present:
            about = [r for r in reasons_absent(backend.name, found.reasons) if r.level is Level.ERROR]
            lines.append(f"no {backend.name}: " + (about[0].text if about else f"no {backend.title} was found here"))
    lines += [f"no {name}: its plug-in could not be loaded: {error}" for name, error in registry().errors.items()]
    return "\n".join(lines)


# --- looking a name up: nothing below warns about a device that is missing, and nothing wakes a driver ----------------


@dataclass(frozen=True)
class Found:
    """The result of looking up a name. `device` is None if no usable one has it; `why` and `reasons` then say why."""

    text: str
    device: Candidate | None
    why: str = ""
    reasons: tuple[Reason, ...] = ()


def find(device: str | torch.device | None = None) -> Found:
    """The usable device a name means; None is the configured device. Raises UnknownDevice and DeviceIndexError."""
    text = configured_request()[0] if device is None else str(device)
    wanted, found, listed, chosen = _look(text)
    if found.facts.hardware.torch is None:
        return Found(text, None, "torch is not installed")
    if chosen is not None:
        return Found(text, chosen)
    reasons = tuple(reasons_for(wanted, listed, found.reasons))
    return Found(text, None, why_not(wanted, listed, reasons), reasons)


def usable_devices(wanted: str | None = None) -> list[Candidate]:
    """Every usable device, best first. Empty where torch is missing or does not import.

    A software adapter is tried, and listed for sure, only if its back end is the `wanted` one.
    """
    found = survey("needed", wanted=wanted)
    if found.facts.hardware.torch is None:
        return []
    return [candidate for candidate in found.devices if candidate.state is State.USABLE]


def device_info() -> dict[str, Any]:
    """The device in use and the torch that drives it, as a dictionary for JSON: what `POST /api/load-model` answers with.

    `device_*` describe the configured device, or the best one; `device_count` is the number of that type, so 1 on a machine
    with only a CPU.
    """
    devices = usable_devices()
    found = find()
    chosen = found.device or next((device for device in devices if device.backend == "cpu"), None)
    machine = survey("never").facts.hardware
    wheel = machine.torch
    return {
        "cuda_available": any(device.torch_type == "cuda" for device in devices),
        "npu_available": any(device.torch_type == "npu" for device in devices),
        "device_count": sum(device.torch_type == chosen.torch_type for device in devices) if chosen else 0,
        "device_name": chosen.name if chosen else "none",
        "device_type": chosen.torch_type if chosen else "none",
        "cuda_version": wheel.cuda if wheel else None,
        "npu_version": machine.packages.versions.get("torch-npu"),
        "backend": chosen.backend if chosen else None,
        "hip_version": wheel.hip if wheel else None,
        "xpu_version": wheel.xpu if wheel else None,
        "torch_version": wheel.version if wheel else None,
        "devices": [device.id for device in devices],
        "reason": found.why,  # why the configured device is not the one in use; "" when it is
    }
