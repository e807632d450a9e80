"""Puts the facts together: what the probes see, and what the child found when it tried."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from anytorch import config
from anytorch.devices.registry import registry
from anytorch.devices.types import BackendReport, DeviceReport, Facts, TorchReport
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware

Tried = Literal["never", "needed", "always"]


def gather(
    tried: Tried = "needed", *, wanted: str | None = None, refresh: bool = False, hardware: Hardware | None = None
) -> Facts:
    """All that is known about this machine.

    `tried` says whether devices are really used, in a child process: "never" (files only, "seen, not tried"), "needed"
    (only if something other than the CPU could come of it; `wanted` is the back end that was asked for), or "always".
    """
    hardware = snapshot() if hardware is None else hardware
    loaded = registry()
    settings: dict[str, Any] = {name: config.get(name) for name in ("backend", "cpu_dtype", "threads")}
    settings["plugin_errors"] = dict(loaded.errors)
    report: TorchReport | None = None
    if tried == "always" or (tried == "needed" and child_could_matter(hardware, wanted)):
        from anytorch.devices.try_out import try_out  # json, hashing and more: not for "files alone"

        report = try_out(hardware, refresh=refresh)
    elif tried == "needed" and hardware.torch is not None:
        report = cpu_only_report(hardware)
    if tried != "never":
        report = with_live_backends(report)
    return Facts(hardware, report, settings)


def child_could_matter(hardware: Hardware, wanted: str | None = None) -> bool:
    """Could anything but the CPU turn out to be usable? If not, starting a child would only cost seconds.

    A software adapter is a reason only for who asks for its back end by name.
    """
    wheel = hardware.torch
    if wheel is None:
        return False
    plugin_groups = {"torch.backends", "anytorch.backends"}
    has_plugin = any(p.group in plugin_groups and p.distribution != "anytorch" for p in hardware.packages.entry_points)
    webgpu = registry().backends.get("webgpu")
    our_gpu_path = "wgpu" in hardware.packages.versions and webgpu is not None and any(
        not candidate.software or wanted == candidate.backend for candidate in webgpu.seen(hardware)
    )
    return wheel.kind != "cpu" or hardware.machine.system == "Darwin" or has_plugin or our_gpu_path


def cpu_only_report(hardware: Hardware) -> TorchReport:
    """What the child would say of a CPU wheel with nothing beside it."""
    assert hardware.torch is not None
    cpu = registry().backends["cpu"]
    (seen,) = cpu.seen(hardware)
    device = DeviceReport(0, seen.name, total=seen.total, free=seen.free, caps=seen.caps, facts=seen.facts)
    return TorchReport(version=hardware.torch.version, backends={"cpu": BackendReport("cpu", (device,))})


def with_live_backends(report: TorchReport | None) -> TorchReport | None:
    """A device that somebody registered in this very process is invisible to the child: ask it here."""
    if "torch" not in sys.modules:
        return report
    live: Mapping[str, BackendReport] = {
        name: found for name, backend in registry().backends.items() if (found := backend.live()) is not None
    }
    if not live:
        return report
    base = TorchReport() if report is None else report
    return replace(base, backends={**base.backends, **live})
