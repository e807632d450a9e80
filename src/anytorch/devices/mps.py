"""Apple GPUs through Metal Performance Shaders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytorch.devices.base import TorchBackend
from anytorch.devices.types import BackendReport, Candidate, Caps, MemoryUse
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware


class MpsBackend(TorchBackend):
    name = "mps"
    torch_type = "mps"
    title = "Apple GPU (MPS)"
    priority = 400
    aliases = ("apple", "metal")
    chips = ("Apple M1, M2, M3, M4 and their Pro, Max and Ultra",)
    precisions = ("float32", "float16", "bfloat16")
    quantizations = ("int8", "int4")
    least_gb, advised_gb = 8, 16

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        return [self.candidate(0, gpu) for gpu in hardware.gpus_of("apple")[:1]]

    def try_out(self) -> BackendReport:
        import torch

        if not torch.backends.mps.is_built():
            return BackendReport(self.name, code="not-built", error=f"torch {torch.__version__} is built without MPS")
        if not torch.backends.mps.is_available():
            return BackendReport(self.name, code="no-device", error="torch.backends.mps.is_available() is False")
        return super().try_out()

    def module(self) -> Any | None:
        import torch

        return torch.mps if torch.backends.mps.is_built() else None

    def initialized(self) -> bool:
        # Metal has no fork problem to protect from, and asking its allocator needs no device context of ours.
        import torch

        return bool(torch.backends.mps.is_available())

    def device_name(self, index: int) -> str:
        return snapshot().cpu.model or self.title  # the GPU is part of the chip: "Apple M2 Pro"

    def memory(self, index: int) -> MemoryUse:
        """torch.mps has its own names: it counts its tensors, Metal's whole allocation and a recommended maximum."""
        module = self.module()
        if module is None or not self.initialized():
            return self.sleeping_memory(index)
        allocated = int(module.current_allocated_memory())
        reserved = int(module.driver_allocated_memory())
        limit = int(module.recommended_max_memory())
        return MemoryUse(allocated, reserved, None, max(0, limit - reserved), limit, "torch.mps (recommended maximum)")

    def synchronize(self, index: int) -> None:
        self.call("synchronize")  # takes no index

    def seed(self, value: int) -> None:
        if self.initialized():
            self.call("manual_seed", value)

    def caps(self, index: int) -> Caps:
        return Caps(
            dtypes=("float32", "float16", "bfloat16", "int8", "int32", "int64", "bool"),  # Metal has no float64
            fast_dtypes=("float32", "float16"),
            autocast_dtype="float16",
            quantizations=self.quantizations,
            unified_memory=True,
        )
