"""Any GPU through Vulkan, Metal or D3D12, with no vendor toolkit: our own torch device, `webgpu`.

The device itself lives in `anytorch.webgpu`, a layer above this one, and is imported by name when it is wanted; this file
finds the adapters and says what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import SOFTWARE_PRIORITY, BackendReport, Candidate, Caps, DeviceReport
from anytorch.probe.facts import Gpu, Hardware
from anytorch.probe.graphics import is_software_icd

DEVICE_MODULE = "anytorch.webgpu"


class WebgpuBackend(TorchBackend):
    name = "webgpu"
    torch_type = "webgpu"
    title = "WebGPU adapter (Vulkan, Metal or D3D12)"
    priority = 300
    aliases = ("vulkan", "wgpu", "d3d12")
    chips = ("whatever has a Vulkan 1.1, Metal or D3D12 driver: NVIDIA, AMD, Intel, Apple, Qualcomm, ARM",)
    precisions = ("float32", "float16")
    quantizations = ("int8", "int4")
    least_gb, advised_gb = 2, 4

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        """One device per process: the best GPU, or the software adapter where there is none. (See `adapter` in docs.)"""
        cards = sorted(
            (gpu for gpu in hardware.gpus if gpu.vendor != "huawei" and gpu.driver != "vfio-pci"),
            key=lambda gpu: (bool(gpu.integrated), gpu.pci or ""),
        )
        if cards:
            return [self.candidate(0, cards[0])]
        software = next((icd for icd in hardware.graphics.vulkan_icds if is_software_icd(icd)), None)
        if software is None or not hardware.graphics.vulkan_loader:
            return []
        found = self.candidate(0, Gpu("", "software Vulkan (llvmpipe)"), software=True, facts={"icd": software.path})
        return [replace(found, priority=SOFTWARE_PRIORITY)]

    def try_out(self) -> BackendReport:
        if find_spec("wgpu") is None:
            return BackendReport(self.name, code="wgpu-missing", error="the package wgpu is not installed")
        holder = privateuse1_name()
        if holder not in ("privateuseone", self.torch_type):
            told = f"torch has one slot for third-party devices, and {holder!r} occupies it"
            return BackendReport(self.name, code="no-device", error=told)
        self.activate()
        module = self.module()
        assert module is not None
        facts = {"adapters": module.adapters()}
        if not facts["adapters"]:
            told = "wgpu found no Vulkan, Metal or D3D12 adapter on this machine"
            return BackendReport(self.name, code="no-device", error=told, facts=facts)
        report = self.try_each(int(module.device_count()))
        return replace(report, facts={**report.facts, **facts})

    def activate(self) -> None:
        """Register torch.webgpu in this process."""
        from importlib import import_module

        import_module(DEVICE_MODULE)

    def describe(self, index: int) -> DeviceReport:
        module = self.module()
        assert module is not None
        found = module.get_device_properties(index)
        use = self.memory(index)
        return DeviceReport(
            index,
            found["name"],
            total=use.total,
            free=use.free,
            integrated=found["kind"] == "IntegratedGPU",
            software=found["kind"] == "CPU",
            caps=self.caps(index),
            facts={
                "api": found["api"],
                "type": found["kind"],
                "driver": found["driver"],
                "features": found["features"],
                "matrix cores": found["matrix_cores"],
            },
        )

    def initialized(self) -> bool:
        """True once the device module is loaded: reading memory figures does not open the device."""
        return self.module() is not None

    def caps(self, index: int) -> Caps:
        module = self.module()
        found = module.get_device_properties(index) if module is not None else {"features": (), "kind": ""}
        has_f16, real = "shader-f16" in found["features"], found["kind"] != "CPU"
        integers = ("int64",) if "shader-int64" in found["features"] else ()
        return Caps(
            dtypes=("float32", *(("float16",) if has_f16 else ()), "bfloat16", "int8", "int32", *integers, "bool"),
            fast_dtypes=("float32", *(("float16",) if has_f16 and real else ())),
            autocast_dtype="float16" if has_f16 and real else None,
            graphs=True,
            flash_attention=True,
            quantizations=self.quantizations,
            unified_memory=found["kind"] in ("IntegratedGPU", "CPU"),
        )


def privateuse1_name() -> str:
    import torch

    return str(torch._C._get_privateuse1_backend_name())
