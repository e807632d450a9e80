"""`BackendOptimizer`, the documented class: look, measure, save, load."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from anytorch import __version__
from anytorch.counts import counted
from anytorch.devices.bench.suite import Progress
from anytorch.devices.choose import survey
from anytorch.devices.ranking import gigabytes
from anytorch.devices.tune.search import tune
from anytorch.devices.tune.store import TunePlan, apply
from anytorch.devices.types import Level
from anytorch.errors import ConfigError
from anytorch.files import replace_file
from anytorch.measured.machine import identity, key_of, what_changed
from anytorch_compat.advice import FORMAT, configuration


class BackendOptimizer:
    """The machine's facts, a configuration for it, and measurements.

    >>> import yirage
    >>> yirage.BackendOptimizer().configure("cpu")["backend"]
    'cpu'
    """

    def configure(self, backend: str | None = None) -> dict[str, Any]:
        """A configuration from facts alone, for a back end or the best one; see `auto_configure_backend`."""
        return configuration(backend)

    def optimize(
        self,
        backend: str | None = None,
        *,
        duration_s: float = 20.0,
        apply_plan: bool = False,
        progress: Progress | None = None,
    ) -> TunePlan:
        """Measure what is faster on a device; with `apply_plan`, store it for later runs."""
        plan = tune(backend, duration_s=duration_s, progress=progress)
        if apply_plan:
            apply(plan)
        return plan

    def system_info(self) -> dict[str, Any]:
        """Machine, torch and every device with its state and the reasons against it, as plain values."""
        found = survey("needed")
        hardware = found.facts.hardware
        return {
            "anytorch": __version__,
            "system": f"{hardware.machine.system} {hardware.machine.release} ({hardware.machine.arch})",
            "python": hardware.machine.python,
            "torch": hardware.torch.version if hardware.torch else None,
            "cpu": hardware.cpu.model,
            "cores": {
                "usable": hardware.cpu.usable,
                "physical": hardware.cpu.physical,
                "threads": hardware.cpu.good_threads,
            },
            "memory": {"total": hardware.memory.usable_total, "available": hardware.memory.usable_available},
            "devices": [
                {
                    "id": device.id,
                    "name": device.name,
                    "state": device.state.value,
                    "total": device.total,
                    "free": device.free,
                    "reasons": [reason.text for reason in device.reasons if reason.level is not Level.NOTE],
                }
                for device in found.devices
            ],
        }

    def print_system_info(self) -> None:
        """Print the machine and its devices to standard output."""
        sys.stdout.write(system_text(self.system_info()))

    def save_config(self, path: str | Path, backend: str | None = None) -> Path:
        """Write the configuration for a back end as JSON, whole or not at all.

        A back end that cannot be used here falls back with a DeviceFallbackWarning; the file records what was
        requested and what it holds instead.
        """
        path = Path(path)
        body = json.dumps(configuration(backend), indent=2, ensure_ascii=False)
        try:
            replace_file(path, (body + "\n").encode())
        except OSError as exc:
            raise ConfigError(
                f"cannot write the configuration {path}: {exc.strerror}", hint="name another file"
            ) from exc
        return path

    def load_config(self, path: str | Path) -> dict[str, Any]:
        """Read a file `save_config` wrote. Raises ConfigError; warns if it was made on another machine."""
        path = Path(path)
        hint = "write it again with `BackendOptimizer().save_config(...)`"
        try:
            data = json.loads(path.read_bytes())
        except OSError as exc:
            raise ConfigError(f"cannot read the configuration {path}: {exc.strerror}", hint=hint) from exc
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"the configuration {path} is not JSON: {exc}", hint=hint) from exc
        if not isinstance(data, dict) or not isinstance(data.get("backend"), str) or data.get("format") != FORMAT:
            raise ConfigError(f"{path} is not a configuration of format {FORMAT}", hint=hint)
        now = identity()
        if data.get("machine_key") != key_of(now):
            before = data.get("machine")
            changed = what_changed(before if isinstance(before, dict) else {}, now)
            warnings.warn(
                f"{path} was made on another machine or before a change: {changed}", UserWarning, stacklevel=2
            )
        return data


def system_text(info: dict[str, Any]) -> str:
    """The facts of `system_info` as lines for a person. Pure."""
    cores, memory = info["cores"], info["memory"]
    lines = [
        f"anytorch  {info['anytorch']}, torch {info['torch'] or 'not installed'}, Python {info['python']}",
        f"system    {info['system']}",
        f"CPU       {info['cpu'] or 'unknown'}: {cores['usable']} usable of {cores['physical'] or '?'} physical cores, "
        f"{counted(cores['threads'], 'thread')} advised",
        f"memory    {gigabytes(memory['available'])} free of {gigabytes(memory['total'])}",
        "devices, best first:",
    ]
    for device in info["devices"]:
        room = f"{gigabytes(device['free'])} free of {gigabytes(device['total'])}"
        lines.append(f"  {device['id']:<10} {device['name']}: {device['state']}, {room}")
        lines += [f"  {'':<10} - {reason}" for reason in device["reasons"]]
    return "\n".join(lines) + "\n"
