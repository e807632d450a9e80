"""NVIDIA GPUs through CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import BackendReport, Candidate, Caps
from anytorch.probe.facts import Hardware
from anytorch.probe.masks import visible

# Dense tensor-core operations per multiprocessor and clock, from NVIDIA's architecture white papers; fp32 without
# tensor cores is 2 × the number of fp32 lanes.
FLOP_PER_CLOCK: dict[tuple[int, int], dict[str, int]] = {
    (7, 0): {"float32": 128, "float16": 1024},
    (7, 5): {"float32": 128, "float16": 1024},
    (8, 0): {"float32": 128, "float16": 2048, "bfloat16": 2048, "tf32": 1024},
    (8, 6): {"float32": 256, "float16": 512, "bfloat16": 512, "tf32": 256},
    (8, 9): {"float32": 256, "float16": 1024, "bfloat16": 1024, "tf32": 512},
    (9, 0): {"float32": 256, "float16": 4096, "bfloat16": 4096, "tf32": 2048},
    (10, 0): {"float32": 256, "float16": 8192, "bfloat16": 8192, "tf32": 4096},
    (12, 0): {"float32": 256, "float16": 1024, "bfloat16": 1024, "tf32": 512},
}


class CudaBackend(TorchBackend):
    name = "cuda"
    torch_type = "cuda"
    title = "NVIDIA GPU (CUDA)"
    priority = 700
    aliases: tuple[str, ...] = ("nvidia",)
    chips = ("GeForce GTX 9xx and newer", "Tesla and data-centre cards from Maxwell on", "Jetson, GB10")
    precisions = ("float32", "float16", "bfloat16", "float64")
    quantizations: tuple[str, ...] = ("int8", "int4", "int2")
    least_gb, advised_gb = 4, 8
    repeatable_environment = MappingProxyType({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        cards = [gpu for gpu in hardware.gpus_of("nvidia") if gpu.driver in (None, "nvidia") or gpu.index is not None]
        # NVML and nvidia-smi number by PCI bus; so do we. CUDA itself does so only with CUDA_DEVICE_ORDER=PCI_BUS_ID,
        # which the doctor says when it matters (different-cards-order).
        cards.sort(key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.pci or ""))
        mask = visible(hardware.env.get("CUDA_VISIBLE_DEVICES"), len(cards), [gpu.uuid or "" for gpu in cards])
        return self.visible(cards, mask, "capability")

    def try_out(self) -> BackendReport:
        import torch

        if torch.version.hip:
            return BackendReport(self.name, code="not-built", error=f"this torch is built for ROCm {torch.version.hip}")
        if torch.version.cuda is None:
            return BackendReport(self.name, code="not-built", error=f"torch {torch.__version__} is built without CUDA")
        return super().try_out()

    def properties(self, index: int) -> dict[str, Any]:
        import torch

        found: Any = torch.cuda.get_device_properties(index)  # its attributes differ between torch versions and builds
        facts: dict[str, Any] = {
            "integrated": bool(getattr(found, "is_integrated", False)),
            "multiprocessors": found.multi_processor_count,
        }
        if getattr(found, "uuid", None) is not None:
            facts["uuid"] = f"GPU-{found.uuid}"
        if hasattr(found, "pci_bus_id"):
            domain = getattr(found, "pci_domain_id", 0)
            facts["pci"] = f"{domain:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        for fact in ("L2_cache_size", "memory_clock_rate", "memory_bus_width", "clock_rate"):
            if getattr(found, fact, None):
                facts[fact] = getattr(found, fact)
        if torch.version.hip:
            facts["gcnArchName"] = found.gcnArchName
        else:
            facts["capability"] = [found.major, found.minor]
        return facts

    def caps(self, index: int) -> Caps:
        import torch

        capability = tuple(torch.cuda.get_device_capability(index))
        # torch.cuda.is_bf16_supported() says True for a T4, which only emulates it: the capability is the fact.
        fast = ["float32"]
        if capability >= (7, 0):
            fast.append("float16")
        if capability >= (8, 0):
            fast.append("bfloat16")
        if capability in ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0)):
            fast.append("float64")
        quantizations = self.quantizations
        if capability >= (8, 9):
            quantizations += ("fp8",)
        if capability >= (10, 0):
            quantizations += ("fp4",)
        facts = self.properties(index)
        no_triton = triton_missing()
        if capability < (7, 0):
            no_triton = f"Triton needs compute capability 7.0, and this GPU has {'.'.join(map(str, capability))}"
        return Caps(
            dtypes=("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "bool"),
            fast_dtypes=tuple(fast),
            autocast_dtype="bfloat16" if "bfloat16" in fast else "float16" if "float16" in fast else None,
            graphs=True,
            triton=not no_triton,
            no_triton=no_triton,
            early_launches=capability >= (9, 0),
            flash_attention=capability >= (8, 0),
            quantizations=quantizations,
            unified_memory=bool(facts.get("integrated")),
            peak_gb_per_s=memory_gb_per_s(facts),
            peak_tflops=matrix_tflops(capability, facts),
        )


def memory_gb_per_s(facts: dict[str, Any]) -> float | None:
    """Two transfers per clock over the whole bus: kHz × bits. None when the driver does not tell."""
    clock_khz, bus_bits = facts.get("memory_clock_rate"), facts.get("memory_bus_width")
    return round(2 * clock_khz * 1e3 * bus_bits / 8 / 1e9, 1) if clock_khz and bus_bits else None


def matrix_tflops(capability: tuple[int, ...], facts: dict[str, Any]) -> dict[str, float]:
    """The architecture's dense rates at the boost clock, per dtype."""
    clock_khz, count = facts.get("clock_rate"), facts.get("multiprocessors")
    rates = FLOP_PER_CLOCK.get((capability[0], capability[1]))
    if not clock_khz or not count or rates is None:
        return {}
    return {dtype: round(rate * count * clock_khz * 1e3 / 1e12, 1) for dtype, rate in rates.items()}


def triton_missing() -> str:
    """Why Triton cannot be imported; "" if it can."""
    from importlib.util import find_spec

    if find_spec("triton") is not None:
        return ""
    return (
        "Triton is not installed, which compiles kernels for it; torch's builds for GPUs bring it: pip install triton"
    )
