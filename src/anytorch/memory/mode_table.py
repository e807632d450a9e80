"""What each mode asks for, as data; `prepared` does it to a model, `modes` turns a mode on and off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """What a mode asks for. `weights` is a format of `anytorch.quant`, for models that are not being trained."""

    name: str
    mixed_precision: bool  # autocast in the dtype that is fast on the device; nothing where none is
    fused_attention: bool  # torch's flash attention first, and models that spell attention out switched to it
    checkpointing: bool  # of the repeated blocks, while training
    weights: str | None
    device_share: float  # of the device's free memory that a model's weights may take; the rest of it streams
    matmul_precision: str  # torch.set_float32_matmul_precision


PRECISIONS = ("highest", "high", "medium")
MODES = {
    mode.name: mode
    for mode in (
        Mode("speed", True, True, False, None, 0.95, "high"),
        Mode("balanced", True, True, False, None, 0.80, "high"),
        Mode("memory", True, True, True, "int4", 0.40, "highest"),
    )
}
