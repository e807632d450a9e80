"""The CPU: always there, the reference for every other device, and the fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import BackendReport, Candidate, Caps, DeviceReport, MemoryUse
from anytorch.probe import snapshot
from anytorch.probe.facts import Cpu, Gpu, Hardware


class CpuBackend(TorchBackend):
    name = "cpu"
    torch_type = "cpu"
    title = "CPU"
    priority = 100
    aliases = ("host",)
    chips = ("x86-64 from AVX2 on is fast", "AArch64 and Apple silicon", "anything else torch runs on")
    precisions = ("float32", "float64")
    quantizations = ("int8", "int4")
    least_gb, advised_gb = 2, 4

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        cpu, memory = hardware.cpu, hardware.memory
        name = cpu.model or f"{hardware.machine.arch} CPU"
        facts = {"cores": cpu.usable, "physical": cpu.physical, "quota": cpu.quota, "simd": simd_level(cpu)}
        itself = Gpu("", name, total=memory.usable_total, free=memory.usable_available)
        return [self.candidate(0, itself, caps=cpu_caps(cpu), facts=facts)]

    def try_out(self) -> BackendReport:
        return self.try_each(1)

    def describe(self, index: int) -> DeviceReport:
        (candidate,) = self.seen(snapshot())
        return DeviceReport(
            0, candidate.name, total=candidate.total, free=candidate.free, caps=self.caps(0), facts=candidate.facts
        )

    def module(self) -> Any | None:
        import torch

        return torch.cpu

    def initialized(self) -> bool:
        return True

    def device_name(self, index: int) -> str:
        hardware = snapshot()
        return hardware.cpu.model or f"{hardware.machine.arch} CPU"

    def caps(self, index: int) -> Caps:
        return cpu_caps(snapshot().cpu)

    def memory(self, index: int) -> MemoryUse:
        """Memory of this process and machine; `allocated` is the resident size (the allocator keeps no statistics)."""
        from anytorch.probe.memory import resident_bytes

        memory = snapshot().memory
        resident, peak = resident_bytes()
        return MemoryUse(
            allocated=resident,
            reserved=resident,
            peak=peak,
            free=memory.usable_available,
            total=memory.usable_total,
            source="cgroup limit" if memory.limit is not None else "operating system",
        )

    def empty_cache(self) -> None:
        return None  # malloc keeps what it keeps; `cleanup` collects garbage for every device

    def synchronize(self, index: int) -> None:
        return None  # CPU operations have finished when they return

    def seed(self, value: int) -> None:
        return None  # torch.manual_seed, which `seed` always calls, is the CPU's


def cpu_caps(cpu: Cpu) -> Caps:
    """bf16 and fp16 are fast only with instructions for them: without, a matmul was 48 to 84 times slower than fp32."""
    features = cpu.features
    fast_bf16 = bool(features & {"avx512_bf16", "amx_bf16", "bf16"}) or (cpu.vendor or "").lower() == "apple"
    fast_fp16 = bool(features & {"avx512_fp16", "amx_fp16", "asimdhp"})
    return Caps(
        dtypes=("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "bool"),
        fast_dtypes=("float32", "float64", *(("bfloat16",) if fast_bf16 else ()), *(("float16",) if fast_fp16 else ())),
        autocast_dtype="bfloat16" if fast_bf16 else None,
        flash_attention=True,  # torch's CPU scaled_dot_product_attention has a flash kernel
        quantizations=("int8", "int4"),
        unified_memory=True,
    )


def simd_level(cpu: Cpu) -> str:
    for feature, level in (
        ("amx_tile", "AMX"),
        ("avx512f", "AVX-512"),
        ("avx2", "AVX2"),
        ("sve", "SVE"),
        ("asimd", "NEON"),
        ("neon", "NEON"),
    ):
        if feature in cpu.features:
            return level
    return "baseline"
