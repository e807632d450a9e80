"""NVIDIA cards that work, with something worth knowing: shared memory, emulated bfloat16, too old for torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from anytorch.devices.doctor.common import gib, installed, named
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import Facts, Level
from anytorch.devices.wheels import cards_of
from anytorch.probe.facts import Gpu

# Jetson (Tegra X1, X2, Xavier, Orin, Thor) and GB10.
UNIFIED_CAPABILITIES = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)})


@diagnosis(
    "unified-memory",
    Level.NOTE,
    "The GPU shares the system's memory",
    symptom="NVML reports no memory for the card, or reports all of the system's RAM as the card's.",
    evidence="NVML answers NotSupported for the memory of a Jetson or GB10, or a total of at least 90 % of the RAM.",
    fix="Nothing is broken. Read the free memory from the system (`anytorch info` does), not from NVML.",
    background=(
        "https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu/issues/1073",
        "https://github.com/XuehaiPan/nvitop/pull/208",
    ),
)
def unified_memory(facts: Facts) -> Iterator[Finding]:
    ram, available = facts.hardware.memory.total, facts.hardware.memory.usable_available
    for gpu in cards_of(facts.hardware, "nvidia"):
        if gpu.unified or gpu.integrated or _looks_unified(gpu, ram):
            left = f"{gib(available)} of it are available" if available is not None else "how much is free is not known"
            yield Finding(
                f"{named(gpu)} shares the system's memory: {left}",
                "anytorch info",
                f"NVML total {gpu.total}, system total {ram}",
            )


def _looks_unified(gpu: Gpu, ram: int | None) -> bool:
    """A card of its own may happen to have as much memory as the system, so the size alone proves nothing."""
    if gpu.capability not in UNIFIED_CAPABILITIES:
        return False
    return gpu.total is None or (ram is not None and gpu.total >= 0.9 * ram)


@diagnosis(
    "bf16-emulated",
    Level.WARNING,
    "bfloat16 is chosen on a card that only emulates it",
    symptom="`torch.cuda.is_bf16_supported()` says True on a T4 or V100, and the model is slow.",
    evidence="The setting `dtype` is bfloat16 and the card's compute capability is below 8.0.",
    fix="Use float16 there: `torch.autocast('cuda', dtype=torch.float16)`, or let `anytorch.autocast()` choose.",
    background=("https://github.com/huggingface/diffusers/pull/14129",),
)
def bf16_emulated(facts: Facts) -> Iterator[Finding]:
    if facts.settings.get("dtype") not in ("bfloat16", "bf16"):
        return
    for gpu in cards_of(facts.hardware, "nvidia"):
        if gpu.capability is not None and gpu.capability < (8, 0):
            yield Finding(
                f"{named(gpu)} (compute capability {gpu.capability[0]}.{gpu.capability[1]}) only emulates bfloat16",
                "use float16 on this card: torch.autocast('cuda', dtype=torch.float16)",
                "bfloat16 hardware starts with compute capability 8.0",
            )


@diagnosis(
    "compile-needs-volta",
    Level.NOTE,
    "torch.compile does not work on this card",
    symptom="`Found … which is too old to be supported by the triton GPU compiler, which is used as the backend. "
    "Triton only supports devices of CUDA Capability >= 7.0`.",
    evidence="A compute capability below 7.0 and a CUDA wheel.",
    fix="Run eagerly on this card (`TORCH_COMPILE_DISABLE=1`), or compile with `backend='aot_eager'`.",
    background=("https://github.com/triton-lang/triton#compatibility",),
)
def compile_needs_volta(facts: Facts) -> Iterator[Finding]:
    wheel = facts.hardware.torch
    if wheel is None or wheel.kind != "cuda":
        return
    for gpu in cards_of(facts.hardware, "nvidia"):
        if gpu.capability is not None and gpu.capability < (7, 0):
            yield Finding(
                f"torch.compile needs compute capability 7.0 or above; {named(gpu)} has "
                f"{gpu.capability[0]}.{gpu.capability[1]}",
                "export TORCH_COMPILE_DISABLE=1",
                f"triton {installed(facts.hardware, 'triton') or '(version unknown)'} supports 7.0 and above",
            )
