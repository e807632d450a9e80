"""Intel GPUs through torch's own `torch.xpu`. (Intel's extension, IPEX, is retired; the doctor says so.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.cuda import triton_missing
from anytorch.devices.types import BackendReport, Candidate, Caps
from anytorch.probe import snapshot
from anytorch.probe.cards import read_level_zero
from anytorch.probe.facts import Hardware


class XpuBackend(TorchBackend):
    name = "xpu"
    torch_type = "xpu"
    title = "Intel GPU (XPU)"
    priority = 500
    aliases = ("intel",)
    chips = ("Arc A and B series", "Data Center GPU Flex and Max", "Core Ultra and Iris Xe integrated graphics")
    precisions = ("float32", "float16", "bfloat16")
    quantizations = ("int8", "int4")
    least_gb, advised_gb = 4, 8

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        cards = sorted(hardware.gpus_of("intel"), key=lambda gpu: (bool(gpu.integrated), gpu.pci or ""))
        return [self.candidate(index, gpu) for index, gpu in enumerate(cards)]

    def facts(self) -> dict[str, Any]:
        """The facts Level Zero reports, which torch reduces to "no device"."""
        loader = snapshot().graphics.level_zero_loader
        if loader is None:
            return {}
        code, devices = read_level_zero(loader)
        return {"level_zero_code": code, "level_zero_devices": devices}

    def try_out(self) -> BackendReport:
        report = super().try_out()
        return report if report.devices else replace(report, facts={**report.facts, **self.facts()})

    def properties(self, index: int) -> dict[str, Any]:
        found = self.call("get_device_properties", index)
        facts = {
            fact: getattr(found, fact)
            for fact in ("platform_name", "driver_version", "max_compute_units", "gpu_eu_count", "has_fp64")
            if isinstance(getattr(found, fact, None), (str, int, bool))
        }
        if getattr(found, "uuid", None) is not None:
            facts["uuid"] = str(found.uuid)
        if hasattr(found, "has_fp16"):
            facts["has_fp16"] = bool(found.has_fp16)
        # SYCL's type of the device; an integrated one shares the host's memory.
        if hasattr(found, "is_integrated_gpu"):
            facts["integrated"] = bool(found.is_integrated_gpu)
        return facts

    def caps(self, index: int) -> Caps:
        facts = self.properties(index)
        bf16 = bool(self.call("is_bf16_supported"))
        fp64: tuple[str, ...] = ("float64",) if facts.get("has_fp64") else ()
        no_triton = triton_missing()
        return Caps(
            dtypes=("float32", *fp64, "float16", "bfloat16", "int8", "int32", "int64", "bool"),
            fast_dtypes=("float32", "float16", *(("bfloat16",) if bf16 else ())),
            autocast_dtype="bfloat16" if bf16 else "float16",
            graphs=hasattr(self.module(), "XPUGraph"),
            triton=not no_triton,
            no_triton=no_triton,
            flash_attention=False,
            quantizations=self.quantizations,
            unified_memory=bool(facts.get("integrated")),
        )
