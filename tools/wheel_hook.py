"""hatchling's hook: a wheel that carries our compiled C++, where ANYTORCH_WHEEL names a platform; the plain one elsewhere.

    ANYTORCH_WHEEL=linux-x86_64 python -m build --wheel        (make dist does it for every platform)

`pip install .`, from a clone or the source distribution, sets nothing: its wheel has no compiled code, and what it needs is
compiled on first use by the machine's own compiler. ANYTORCH_WHEEL_LEVELS=avx2,avx512 leaves the other SIMD levels out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))

import carried_kernels


class CarriedKernels(BuildHookInterface):  # type: ignore[type-arg, misc]
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        if not os.environ.get("ANYTORCH_WHEEL"):
            return []
        try:
            carried_kernels.find_zig()
        except FileNotFoundError:
            return [carried_kernels.ZIG]
        return []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = os.environ.get("ANYTORCH_WHEEL")
        if not name or version == "editable":
            return
        if name not in carried_kernels.PLATFORMS:
            known = ", ".join(carried_kernels.PLATFORMS)
            raise SystemExit(f"ANYTORCH_WHEEL={name}: unknown platform; known: {known}")
        platform = carried_kernels.PLATFORMS[name]
        levels = [level for level in os.environ.get("ANYTORCH_WHEEL_LEVELS", "").split(",") if level] or None
        output = Path(os.environ.get("ANYTORCH_CARRIED") or Path(self.root) / ".cache" / "carried")
        folder = carried_kernels.build(platform, output, levels=levels, workers=int(os.environ.get("JOBS") or 1))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.tag}"
        for file in carried_kernels.carried_files(folder):
            build_data["force_include"][str(file)] = f"anytorch/native/built/{platform.name}/{file.name}"
