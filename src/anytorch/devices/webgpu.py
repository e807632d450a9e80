"""Any GPU through Vulkan, Metal or D3D12, with no vendor toolkit: our own torch device, `webgpu`.

The device itself lives in `anytorch.webgpu`, a layer above this one, and is looked up by name; this file finds the
adapters and says what is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import SOFTWARE_PRIORITY, BackendReport, Candidate, Caps, DeviceReport, State
from anytorch.probe.facts import Hardware

DEVICE_MODULE = "anytorch.webgpu"
SOFTWARE_DRIVERS = ("lvp_icd", "lavapipe", "swiftshader", "vk_swiftshader")


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
        cards = sorted(
            (gpu for gpu in hardware.gpus if gpu.vendor != "huawei" and gpu.driver != "vfio-pci"),
            key=lambda gpu: (bool(gpu.integrated), gpu.pci or ""),
        )
        found = [self.candidate(index, gpu) for index, gpu in enumerate(cards)]
        icds = hardware.graphics.vulkan_icds
        software = next((icd for icd in icds if any(word in icd.path for word in SOFTWARE_DRIVERS)), None)
        if software is not None and hardware.graphics.vulkan_loader:
            found.append(
                Candidate(
                    backend=self.name,
                    torch_type=self.torch_type,
                    index=len(found),
                    name="software Vulkan (llvmpipe)",
                    state=State.SEEN,
                    priority=SOFTWARE_PRIORITY,
                    software=True,
                    facts={"icd": software.path},
                )
            )
        return found

    def try_out(self) -> BackendReport:
        if find_spec("wgpu") is None:
            return BackendReport(self.name, code="wgpu-missing", error="the package wgpu is not installed")
        adapters = self.adapters()
        facts = {"adapters": adapters}
        if not adapters:
            return BackendReport(
                self.name, code="no-device", error="wgpu found no adapter on this machine", facts=facts
            )
        if find_spec(DEVICE_MODULE) is None:
            return BackendReport(
                self.name,
                code="not-built",
                error=f"this version of anytorch does not ship the webgpu device yet ({DEVICE_MODULE} is missing)",
                facts=facts,
            )
        self.activate()
        module = self.module()
        assert module is not None
        report = self.try_each(int(module.device_count()))
        return replace(report, facts={**report.facts, **facts})

    def activate(self) -> None:
        """Register torch.webgpu in this process."""
        from importlib import import_module

        import_module(DEVICE_MODULE)

    def describe(self, index: int) -> DeviceReport:
        adapter = self.adapters()[index]
        use = self.memory(index)
        return DeviceReport(
            index,
            adapter["name"],
            total=use.total,
            free=use.free,
            integrated=adapter["type"] == "IntegratedGPU",
            software=adapter["type"] == "CPU",
            caps=self.caps(index),
            facts=adapter,
        )

    def adapters(self) -> list[dict[str, Any]]:
        """Every adapter wgpu offers, real GPUs first and the best API of each card only."""
        import wgpu

        found = [
            {"name": info["device"], "api": info["backend_type"], "type": info["adapter_type"]}
            for info in (adapter.info for adapter in wgpu.gpu.enumerate_adapters_sync())
            if info["backend_type"] in ("Vulkan", "Metal", "D3D12")
        ]
        order = {"DiscreteGPU": 0, "IntegratedGPU": 1, "VirtualGPU": 2, "Unknown": 3, "CPU": 4}
        return sorted(found, key=lambda adapter: order.get(adapter["type"], 3))

    def caps(self, index: int) -> Caps:
        return Caps(
            dtypes=("float32", "float16", "int32", "bool"),
            fast_dtypes=("float32",),
            autocast_dtype=None,
            quantizations=self.quantizations,
        )
