"""Hardware facts without torch: one look at the machine from files and a few C calls, which never raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from anytorch.probe.apple import Sysctl
    from anytorch.probe.facts import Hardware

__all__ = ["snapshot"]


def snapshot(
    root: str | Path = "/",
    env: Mapping[str, str] | None = None,
    *,
    sys_path: Sequence[str] | None = None,
    system: str | None = None,
    arch: str | None = None,
    sysctl: Sysctl | None = None,
) -> Hardware:
    """Everything that can be known about the machine without torch and without starting a driver.

    It never raises: a reader that fails becomes a line in `Hardware.problems`. With another `root` than "/" all files
    are taken below it, the environment and `sys_path` are empty unless given, and no library is loaded unless the
    environment names one (ANYTORCH_NVML_LIBRARY, ANYTORCH_LEVEL_ZERO_LIBRARY; on the real machine the first replaces
    the NVML the loader would find). `system` ("Linux", "Darwin", "Windows"), `arch` and `sysctl` (a function from a
    name to its value) stand in for what a recorded folder cannot hold.

    >>> snapshot().machine.system
    'Linux'
    """
    from anytorch.probe.collect import collect

    return collect(root, env, sys_path=sys_path, system=system, arch=arch, sysctl=sysctl)
