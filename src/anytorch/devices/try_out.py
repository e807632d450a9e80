"""Try torch and every back end in a child process with a time limit, and cache its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from anytorch import logs, settings
from anytorch._version import __version__
from anytorch.cache import Store
from anytorch.child_process import ask
from anytorch.devices.registry import registry
from anytorch.devices.types import BackendReport, Caps, DeviceReport, TorchReport
from anytorch.errors import CacheError
from anytorch.probe.facts import Hardware, as_json

log = logs.logger(__name__)

ENTRY = "anytorch.devices.child:main"

# Settings that say nothing about what a device can do: a shell that sets one of their variables need not wait for
# another trial. What a settings file may say of devices is in the key by its value, wherever the file is.
ASIDE = (
    *("backend", "strict", "log_level", "probe_timeout_s", "mode", "measure_kernels", "measure_s", "save_kernels"),
    *("trust_cache", "api_key_file", "config_file", "cache_dir"),
)


def try_out(hardware: Hardware, *, refresh: bool = False) -> TorchReport:
    """The report of trying torch and every back end on this machine; from the cache if nothing has changed.

    A cache that cannot be read raises nothing here: it is said in the log, left as it was, and not used.
    """
    store, key = Store("devices"), cache_key(hardware)
    try:
        stored = None if refresh else store.get(key)
    except CacheError as exc:
        log.warning("%s", exc.message)
        return run_children()
    if stored is not None:
        try:
            log.debug("using the cached result: %s, key %s", store.path, key)
            return replace(report_from_json(stored), cached=True)
        except (TypeError, ValueError, AttributeError, KeyError) as exc:
            log.warning("the entry in %s is invalid (%s); trying the devices again", store.path, exc)
    else:
        log.debug("%s in %s under the key %s", "not looked for" if refresh else "nothing", store.path, key)
    report = run_children()
    # A crash or a time-out may be a bad moment rather than a fact about the machine: it is not remembered.
    passing = {"crashed", "timed-out"}
    if not report.import_error and not any(r.code in passing for r in report.backends.values()):
        try:
            store.put(key, as_json(report))
            log.debug("stored in %s under the key %s", store.path, key)
        except CacheError as exc:
            log.warning("%s", exc.message)
    return report


def cache_key(hardware: Hardware) -> str:
    """The cache key: changes with the driver, wheel, plug-ins, masks, boot, cards and our own version."""
    import hashlib

    wheel = hardware.torch
    version_file = Path(wheel.path) / "version.py" if wheel else None
    stamp = version_file.stat().st_mtime_ns if version_file and version_file.is_file() else None
    aside = {variable for name in ASIDE for variable in settings.SETTINGS[name].env}
    parts = [
        __version__,
        sys.executable,
        hardware.machine.boot_id,
        hardware.nvidia.kernel_version,
        hardware.nvidia.driver,
        wheel.version if wheel else None,
        stamp,
        as_json(hardware.packages),
        {name: value for name, value in hardware.env.items() if name not in aside},
        [(gpu.vendor, gpu.pci, gpu.uuid, gpu.driver) for gpu in hardware.gpus],
        [icd.path for icd in hardware.graphics.vulkan_icds],
        sorted(registry().errors),
        [settings.get(name) for name in ("plugins", "webgpu_adapter", "webgpu_memory")],
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def run_children(names: Sequence[str] = (), *, timeout_s: float | None = None) -> TorchReport:
    """Try the named back ends (all of them if none is named), each once, whatever happens to the process doing it."""
    limit_s = settings.get("probe_timeout_s") if timeout_s is None else timeout_s
    started = monotonic()
    left = list(names) or list(registry().backends)
    version: str | None = None
    facts: dict[str, Any] = {}
    reports: dict[str, BackendReport] = {}
    autoload_error = import_error = ""
    environment: dict[str, str] = {}
    while left:
        lines, end = ask(ENTRY, left, limit_s=limit_s - (monotonic() - started), environment=environment)
        trying = ""
        for line in lines:
            facts.update(line.get("facts") or {})
            if line["event"] == "torch":
                version = line["version"]
            elif line["event"] == "import-failed":
                import_error = line["error"]
            elif line["event"] == "trying":
                trying = line["backend"]
            elif line["event"] == "report":
                reports[line["backend"]] = backend_from_json(line["report"])
                trying = ""
        left = [name for name in left if name not in reports]
        if import_error:
            if environment:
                break  # plug-in autoload is off already: torch itself is broken
            # A plug-in can make `import torch` fail; without autoload we learn whether it was one, and go on.
            autoload_error, import_error = import_error, ""
            environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            continue
        if not left:
            break
        if end == "timed-out":
            for name in left:
                told = f"no answer within {limit_s:g} s" + ("" if name == trying else "; not reached")
                reports[name] = BackendReport(name, code="timed-out", error=told)
            break
        # It died. Blame the back end it was trying; if torch's own import killed it, nothing can be tried.
        if not trying:
            import_error = f"the process that imports torch died: {end}"
            break
        reports[trying] = BackendReport(trying, code="crashed", error=f"trying it ended the process: {end}")
        left.remove(trying)
    if import_error and autoload_error:
        autoload_error = ""
    return TorchReport(version, import_error, autoload_error, reports, facts, round(monotonic() - started, 3))


# --- JSON back into values -----------------------------------------------------------------------------------------


def report_from_json(data: Mapping[str, Any]) -> TorchReport:
    backends = {name: backend_from_json(report) for name, report in data["backends"].items()}
    return TorchReport(**{**data, "backends": backends})


def backend_from_json(data: Mapping[str, Any]) -> BackendReport:
    return BackendReport(**{**data, "devices": tuple(device_from_json(device) for device in data["devices"])})


def device_from_json(data: Mapping[str, Any]) -> DeviceReport:
    told = data.get("caps") or {}
    caps: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}
    return DeviceReport(**{**data, "caps": Caps(**caps) if caps else None})
