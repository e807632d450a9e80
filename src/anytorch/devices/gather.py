"""Puts the facts together: what the probes see, and what the child found when it tried."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from anytorch import logs, settings
from anytorch.devices.registry import registry
from anytorch.devices.types import BackendReport, DeviceReport, Facts, TorchReport
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware

Tried = Literal["never", "needed", "always"]
log = logs.logger(__name__)


def gather(
    tried: Tried = "needed", *, wanted: str | None = None, refresh: bool = False, hardware: Hardware | None = None
) -> Facts:
    """Collect all facts about this machine.

    `tried` says whether devices are really used, in a child process: "never" (files only, "seen, not tried"), "needed"
    (only if something other than the CPU could come of it; `wanted` is the back end that was asked for), or "always".
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
        log.debug("no child: with torch %s only the CPU could come of it", hardware.torch.version)
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

    A software adapter is a reason only for who asks for its back end by name.
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
