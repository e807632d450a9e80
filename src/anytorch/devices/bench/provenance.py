"""Where a number comes from: machine, torch, driver, date, version and commit. Every result carries them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anytorch.probe.facts import Hardware

# What kernels choose their code by: a number means little without them.
FEATURES = {
    *("sse4_2", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_int8", "amx_bf16", "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
}


def machine_facts(hardware: Hardware) -> dict[str, Any]:
    cpu = hardware.cpu
    return {
        "system": f"{hardware.machine.system} {hardware.machine.release}",
        "arch": hardware.machine.arch,
        "python": hardware.machine.python,
        "container": hardware.machine.container,
        "cpu": cpu.model,
        "features": sorted(cpu.features & FEATURES),
        "cores": {"logical": cpu.logical, "physical": cpu.physical, "usable": cpu.usable},
        "memory_nbytes": hardware.memory.usable_total,
        "gpus": [{"name": gpu.name, "uuid": gpu.uuid, "total_nbytes": gpu.total} for gpu in hardware.gpus],
    }


def today() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """The commit of the source tree this package runs from ("…-dirty" with changes), None when installed or no git."""
    import os
    import subprocess

    tree = Path(__file__).resolve().parents[4]
    if not (tree / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40", "--match="],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},  # look, never write the index
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
