"""AMD GPUs through ROCm. torch calls them "cuda"; `torch.version.hip` tells them apart."""

from __future__ import annotations

from collections.abc import Sequence

from anytorch.devices.base import TorchBackend
from anytorch.devices.cuda import CudaBackend, memory_gb_per_s, triton_missing
from anytorch.devices.types import BackendReport, Candidate, Caps
from anytorch.probe.facts import Hardware
from anytorch.probe.masks import rocm_visible

# LLVM's AMDGPU target list: the data-centre parts (CDNA) whose matrix cores take bf16 and fp64.
CDNA = ("gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950")


class RocmBackend(CudaBackend):
    name = "rocm"
    torch_type = "cuda"
    title = "AMD GPU (ROCm)"
    priority = 700
    aliases: tuple[str, ...] = ("hip", "amd")
    chips = ("Radeon RX 6000/7000/9000", "Radeon Pro", "Instinct MI100/MI200/MI300")
    precisions = ("float32", "float16", "bfloat16", "float64")
    quantizations: tuple[str, ...] = ("int8", "int4")
    least_gb, advised_gb = 4, 8

    def seen(self, hardware: Hardware) -> Sequence[Candidate]:
        # HIP's own numbering comes from KFD; a card with no KFD node (index None) is not a compute device of ROCm.
        cards = sorted(
            (gpu for gpu in hardware.gpus_of("amd") if gpu.index is not None), key=lambda gpu: gpu.index or 0
        ) or list(hardware.gpus_of("amd"))
        mask = rocm_visible(hardware.env, len(cards), [gpu.uuid or "" for gpu in cards])
        return self.visible(cards, mask, "arch")

    def try_out(self) -> BackendReport:
        import torch

        if not torch.version.hip:
            return BackendReport(self.name, code="not-built", error=f"torch {torch.__version__} is built without ROCm")
        return TorchBackend.try_out(self)

    def caps(self, index: int) -> Caps:
        facts = self.properties(index)
        arch = str(facts.get("gcnArchName", "")).split(":")[0]
        # RDNA 1 and 2 (gfx10xx) have no matrix units and emulate bf16; torch says True for every HIP build.
        has_bf16 = arch in CDNA or arch.startswith(("gfx11", "gfx12"))
        fast = ("float32", "float16", *(("bfloat16",) if has_bf16 else ()), *(("float64",) if arch in CDNA else ()))
        no_triton = triton_missing()
        return Caps(
            dtypes=("float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "bool"),
            fast_dtypes=fast,
            autocast_dtype="bfloat16" if has_bf16 else "float16",
            graphs=True,
            triton=not no_triton,
            no_triton=no_triton,
            flash_attention=has_bf16,
            quantizations=self.quantizations,
            unified_memory=bool(facts.get("integrated")),
            peak_gb_per_s=memory_gb_per_s(facts),
        )
