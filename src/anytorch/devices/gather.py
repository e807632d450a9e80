"""One survey of the machine: what the probes see, what the child found when it tried, what the doctor says of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from anytorch import logs, settings
from anytorch.devices.doctor import diagnose
from anytorch.devices.ranking import rank
from anytorch.devices.registry import registry
from anytorch.devices.types import (
    SOFTWARE_PRIORITY,
    Backend,
    BackendReport,
    Candidate,
    DeviceReport,
    Facts,
    Level,
    Reason,
    State,
    TorchReport,
)
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware
from anytorch.values import dataclass

Tried = Literal["never", "needed", "always"]
log = logs.logger(__name__)


@dataclass(frozen=True)
class Survey:
    """The result of one survey of the machine: facts, diagnoses and devices, best first."""

    facts: Facts
    reasons: tuple[Reason, ...]
    devices: tuple[Candidate, ...]


def survey(
    tried: Tried = "needed", *, wanted: str | None = None, refresh: bool = False, hardware: Hardware | None = None
) -> Survey:
    return survey_of(gather(tried, wanted=wanted, refresh=refresh, hardware=hardware))


def survey_of(facts: Facts) -> Survey:
    reasons = diagnose(facts)
    return Survey(facts, reasons, tuple(rank(candidates(facts, registry().backends.values(), reasons))))


def gather(
    tried: Tried = "needed", *, wanted: str | None = None, refresh: bool = False, hardware: Hardware | None = None
) -> Facts:
    """Collect all facts about this machine.

    `tried` says whether devices are really used, in a child process: "never" (files only, "seen, not tried"), "needed"
    (only if something other than the CPU could come of it; `wanted` is the back end the user asks for), or "always".
    """
    hardware = snapshot() if hardware is None else hardware
    loaded = registry()
    values: dict[str, Any] = {name: settings.get(name) for name in ("backend", "cpu_dtype", "threads")}
    values["plugin_errors"] = dict(loaded.errors)
    report: TorchReport | None = None
    if tried == "always" or (tried == "needed" and child_could_matter(hardware, wanted)):
        from anytorch.devices.try_out import try_out  # json, hashing and more: not for "files alone"

        report = try_out(hardware, refresh=refresh)
    elif tried == "needed" and hardware.torch is not None:
        log.debug("no child process is started: torch %s supports the CPU only", hardware.torch.version)
        report = cpu_only_report(hardware)
    if tried != "never" and "torch" in sys.modules:
        values["dtype"] = chosen_dtype()
        report = with_this_process(report)
    return Facts(with_child_facts(hardware, report), report, values)


def with_child_facts(hardware: Hardware, report: TorchReport | None) -> Hardware:
    """The facts with those only the child process may ask for: asking Level Zero loads Intel's whole driver."""
    facts = report.backends["xpu"].facts if report is not None and "xpu" in report.backends else {}
    if "level_zero_code" not in facts:
        return hardware
    code, devices = facts["level_zero_code"], facts["level_zero_devices"]
    return replace(hardware, graphics=replace(hardware.graphics, level_zero_code=code, level_zero_devices=devices))


def child_could_matter(hardware: Hardware, wanted: str | None = None) -> bool:
    """True if a device besides the CPU could be usable; if not, a child process would only cost seconds.

    A software adapter is a reason only if its back end was requested by name.
    """
    wheel = hardware.torch
    if wheel is None:
        return False
    plugin_groups = {"torch.backends", "anytorch.backends"}
    has_plugin = any(p.group in plugin_groups and p.distribution != "anytorch" for p in hardware.packages.entry_points)
    webgpu = registry().backends.get("webgpu")
    our_gpu_path = (
        "wgpu" in hardware.packages.versions
        and webgpu is not None
        and any(not candidate.software or wanted == candidate.backend for candidate in webgpu.seen(hardware))
    )
    return wheel.kind != "cpu" or hardware.machine.system == "Darwin" or has_plugin or our_gpu_path


def cpu_only_report(hardware: Hardware) -> TorchReport:
    """The report the child process would give for a CPU-only torch."""
    assert hardware.torch is not None
    cpu = registry().backends["cpu"]
    (seen,) = cpu.seen(hardware)
    device = DeviceReport(0, seen.name, total=seen.total, free=seen.free, caps=seen.caps, facts=seen.facts)
    return TorchReport(version=hardware.torch.version, backends={"cpu": BackendReport("cpu", (device,))})


def with_this_process(report: TorchReport | None) -> TorchReport:
    """Add what only the user's own process knows: devices registered in it by hand, and what it has done to its driver."""
    live: Mapping[str, BackendReport] = {
        name: found for name, backend in registry().backends.items() if (found := backend.live()) is not None
    }
    base = TorchReport() if report is None else report
    merged = {name: with_use(found) for name, found in {**base.backends, **live}.items()}
    return replace(base, backends=merged, facts={**base.facts, **about_this_process()})


def with_use(report: BackendReport) -> BackendReport:
    """Mark the devices this process has memory on, where there is more than one to choose from."""
    backend = registry().backends.get(report.name)
    if len(report.devices) < 2 or backend is None:
        return report
    marked = [
        replace(device, facts={**device.facts, "in_use": True}) if backend.memory(device.index).allocated else device
        for device in report.devices
    ]
    return replace(report, devices=tuple(marked))


def about_this_process() -> dict[str, Any]:
    import multiprocessing

    import torch

    method = multiprocessing.get_start_method(allow_none=True)
    return {
        "cuda_initialized_before": torch.cuda.is_initialized(),
        "start_method": method or multiprocessing.get_all_start_methods()[0],  # the first one is the default
        "mask_at_import": mask_at_start(),
        "mask_now": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def mask_at_start() -> str | None:
    """CUDA_VISIBLE_DEVICES at the start of this process; its present value where the system does not tell."""
    try:
        with open("/proc/self/environ", "rb") as file:  # noqa: PTH123
            pairs = file.read().split(b"\0")
    except OSError:
        return os.environ.get("CUDA_VISIBLE_DEVICES")
    prefix = b"CUDA_VISIBLE_DEVICES="
    return next((pair[len(prefix) :].decode(errors="replace") for pair in pairs if pair.startswith(prefix)), None)


def chosen_dtype() -> str:
    """The dtype this process computes in on a CUDA device: autocast's if it is on, else the default one."""
    import torch

    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.get_default_dtype()
    return str(dtype).removeprefix("torch.")


# --- what was seen, what was tried and what the doctor says, as one list of devices; pure -----------------------------


def candidates(facts: Facts, backends: Iterable[Backend], reasons: Sequence[Reason]) -> list[Candidate]:
    """Every device that a request could mean, best back end first. Unusable ones are listed with their reasons."""
    found: list[Candidate] = []
    for backend in backends:
        about = tuple(reason for reason in reasons if backend.name in reason.backends)
        seen = list(backend.seen(facts.hardware))
        report = facts.torch.backends.get(backend.name) if facts.torch is not None else None
        if report is None:
            found += [_not_tried(candidate, about, facts) for candidate in seen]
        else:
            found += _tried(backend, seen, report, about)
    return found


def _not_tried(candidate: Candidate, about: tuple[Reason, ...], facts: Facts) -> Candidate:
    blocked = any(reason.level is Level.ERROR for reason in about)
    tried_something = facts.torch is not None and bool(facts.torch.import_error)
    return replace(candidate, reasons=about, state=State.UNUSABLE if blocked or tried_something else State.SEEN)


def _tried(
    backend: Backend, seen: list[Candidate], report: BackendReport, about: tuple[Reason, ...]
) -> list[Candidate]:
    result = []
    left = list(seen)
    for device in report.devices:
        match = _match(device, left)
        if match is not None:
            left.remove(match)
        result.append(_usable(backend, device, match, about))
    broken = report.facts.get("broken") or {}
    taken = {candidate.index for candidate in result}
    for candidate in left:
        # A card the probes saw and the child could not use. Its own index may be taken by a usable one under a mask.
        if candidate.index in taken:
            continue
        error = str(broken.get(str(candidate.index)) or report.error or "torch does not list this device")
        result.append(replace(candidate, state=State.UNUSABLE, reasons=about or (_told(backend, report, error),)))
    return result


def _usable(backend: Backend, device: DeviceReport, match: Candidate | None, about: tuple[Reason, ...]) -> Candidate:
    software = device.software or (match.software if match else False)
    base = match or Candidate(
        backend.name, backend.torch_type, device.index, device.name, State.USABLE, priority=backend.priority
    )
    return replace(
        base,
        index=device.index,
        name=device.name,
        state=State.USABLE,
        uuid=device.uuid or base.uuid,
        pci=device.pci or base.pci,
        total=device.total if device.total is not None else base.total,
        # The probes look now; the child's figure may come from the cache and be days old.
        free=base.free if base.free is not None else device.free,
        integrated=device.integrated if device.integrated is not None else base.integrated,
        software=software,
        priority=SOFTWARE_PRIORITY if software else base.priority,
        caps=device.caps or base.caps,
        in_use=bool(device.facts.get("in_use")),
        reasons=about,
        facts={**base.facts, **device.facts},
    )


def _match(device: DeviceReport, seen: Sequence[Candidate]) -> Candidate | None:
    """The same card among those seen: by UUID, then PCI address, then index."""
    for candidate in seen:
        if device.uuid and device.uuid == candidate.uuid:
            return candidate
    for candidate in seen:
        if device.pci and candidate.pci and device.pci.lower() == candidate.pci.lower():
            return candidate
    for candidate in seen:
        same_kind = device.software == candidate.software
        if candidate.index == device.index and same_kind and not (device.uuid and candidate.uuid):
            return candidate
    return None


def _told(backend: Backend, report: BackendReport, error: str) -> Reason:
    """The child's own words, when no diagnosis explains them."""
    return Reason(
        code=report.code or "device-failed",
        level=Level.ERROR,
        text=f"{backend.title}: {error}",
        fix="anytorch doctor",
        evidence="tried in a child process",
        backends=(backend.name,),
    )
