"""Huawei Ascend NPUs through `torch_npu`, which needs the CPU wheel of torch and CANN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import BackendReport, Candidate, Caps
from anytorch.probe.facts import Hardware
from anytorch.probe.masks import visible


class NpuBackend(TorchBackend):
    name = "npu"
    torch_type = "npu"
    title = "Huawei Ascend NPU"
    priority = 600
    aliases = ("ascend", "huawei")
    chips = ("Ascend 910, 910B, 910C", "Ascend 310P")
    precisions = ("float32", "float16", "bfloat16")
    quantizations = ("int8", "int4")
    least_gb, advised_gb = 8, 32

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        cards = sorted(hardware.gpus_of("huawei"), key=lambda gpu: (gpu.index is None, gpu.index or 0))
        mask = visible(hardware.env.get("ASCEND_RT_VISIBLE_DEVICES"), len(cards), [gpu.uuid or "" for gpu in cards])
        return self.visible(cards, mask)

    def try_out(self) -> BackendReport:
        import torch

        if not hasattr(torch, "npu"):
            # Autoload may be off; asking for the plug-in by name gives the true reason when it cannot load.
            try:
                import torch_npu  # noqa: F401
            except ModuleNotFoundError as exc:
                if exc.name == "torch_npu":
                    return BackendReport(self.name, code="not-built", error="torch_npu is not installed")
                raise
        return super().try_out()

    def activate(self) -> None:
        """torch loads the plug-in by itself unless autoload is off."""
        import torch

        if not hasattr(torch, "npu"):
            import torch_npu  # noqa: F401

    def properties(self, index: int) -> dict[str, Any]:
        found = self.call("get_device_properties", index)
        return {
            fact: getattr(found, fact)
            for fact in ("total_memory", "cube_core_num", "vector_core_num", "L2_cache_size")
            if isinstance(getattr(found, fact, None), int)
        }

    def caps(self, index: int) -> Caps:
        bf16 = bool(self.call("is_bf16_supported"))
        return Caps(
            # No float64 and only partial int64 arithmetic (diffusers keeps the same list).
            dtypes=("float32", "float16", *(("bfloat16",) if bf16 else ()), "int8", "int32", "bool"),
            fast_dtypes=("float16", *(("bfloat16",) if bf16 else ())),
            autocast_dtype="bfloat16" if bf16 else "float16",
            graphs=hasattr(self.module(), "NPUGraph"),
            triton=False,
            flash_attention=True,
            quantizations=self.quantizations,
        )
