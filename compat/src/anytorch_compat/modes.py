"""The modes under the names of document 5 (`apt_model.optimization.vb_global`), on top of `anytorch.mode`.

Enabling a mode sets what the process shares (attention kernels, float32 precision) and acts on every model that runs on its
device afterwards; `get_config()["models"]` and `explain()` say what became of each. `optimize_model` prepares one before it
runs. Each `enable…` prints what is in force, in the document's own words, because scripts written for it are read that way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anytorch import settings
from anytorch.memory import modes
from anytorch_compat.stack import VGPUStack, create_vgpu_stack
from anytorch_compat.system import get_accelerator_type

if TYPE_CHECKING:
    import torch

_stack: VGPUStack | None = None


def enable(
    use_fp4: bool = False,
    use_flash_attn: bool = True,
    mixed_precision: bool = True,
    gradient_checkpointing: bool = False,
    auto_estimate: bool = True,
    vgpu_config: dict[str, Any] | None = None,
    verbose: bool = True,
    use_mxfp4: bool = False,
    device: str | torch.device = "auto",
) -> modes.ActiveMode:
    """A mode put together by hand. `auto_estimate` is accepted: memory is always measured, never estimated."""
    weights = "mxfp4" if use_mxfp4 else "fp4" if use_fp4 else None
    changes = {
        "mixed_precision": mixed_precision,
        "fused_attention": use_flash_attn,
        "checkpointing": gradient_checkpointing,
        "weights": weights,
    }
    return _switch("balanced", device, vgpu_config, verbose, **changes)


def enable_balanced_mode(verbose: bool = True, device: str | torch.device = "auto") -> modes.ActiveMode:
    return _switch("balanced", device, None, verbose)


def enable_memory_mode(verbose: bool = True, device: str | torch.device = "auto") -> modes.ActiveMode:
    return _switch("memory", device, None, verbose)


def enable_speed_mode(verbose: bool = True, device: str | torch.device = "auto") -> modes.ActiveMode:
    return _switch("speed", device, None, verbose)


def enable_full_optimization(verbose: bool = True, device: str | torch.device = "auto") -> modes.ActiveMode:
    """Everything at once: the memory mode with four-bit floats (MXFP4)."""
    return _switch("memory", device, None, verbose, weights="mxfp4")


ENABLE = {
    "balanced": enable_balanced_mode,
    "memory": enable_memory_mode,
    "speed": enable_speed_mode,
    "full": enable_full_optimization,
}


def enable_from_environment() -> modes.ActiveMode | None:
    """What `ENABLE_VIRTUAL_BLACKWELL=1` and `VB_MODE` ask for when the documented module is imported."""
    if not settings.lookup("virtual_blackwell").value:
        return None
    return ENABLE[str(settings.lookup("mode").value)]()


def disable() -> None:
    """Put the process and every prepared model back as they were; nothing happens if no mode is on."""
    global _stack
    running = modes.active()
    if running is not None:
        running.off()
    if _stack is not None:
        _stack.close()
        _stack = None


def is_enabled() -> bool:
    return modes.active() is not None


def get_config() -> dict[str, Any]:
    """What is in force now; empty if no mode is on."""
    running = modes.active()
    return running.describe() if running is not None else {}


def explain() -> str:
    """What the mode asks for, and what became of it for every model that ran, with the reasons."""
    running = modes.active()
    return running.explain() if running is not None else "no mode is on"


def get_stack() -> VGPUStack | None:
    """The tiers of the enabled mode, made when they are first asked for; None if no mode is on."""
    global _stack
    if modes.active() is None:
        return None
    if _stack is None:
        _stack = create_vgpu_stack()
    return _stack


def optimize_model(model: torch.nn.Module, model_name: str | None = None) -> torch.nn.Module:
    """Prepare a model for the enabled mode (the balanced one if none is on); returns the same module."""
    running = modes.active() or enable_balanced_mode(verbose=False)
    return running.apply(model)


def get_stats() -> dict[str, Any]:
    return get_config() | ({"stack": _stack.get_stats()} if _stack is not None else {})


def print_stats() -> None:
    for name, value in get_stats().items():
        sys.stdout.write(f"{name}: {value}\n")


def summary() -> str:
    """The document's summary: device, FP4 quantization, flash attention, and the rest of what is in force."""
    running = modes.active()
    if running is None:
        return "虚拟Blackwell未启用 (no mode is on)\n"
    now = running.describe()
    budget = now["device budget"]
    lines = {
        "模式": running.mode.name,
        "加速设备": f"{now['device']} ({get_accelerator_type().upper()})",
        "FP4量化": _mark(running.mode.weights in ("fp4", "nf4", "mxfp4", "nvfp4"), running.mode.weights),
        "权重格式": f"{running.mode.weights} (推理时, in inference)" if running.mode.weights else "原样 (unchanged)",
        "Flash Attention": _mark(running.mode.fused_attention, now["attention"]),
        "混合精度": _mark(
            now["autocast"] is not None, now["autocast"] or "在此设备上不更快 (not faster on this device)"
        ),
        "梯度检查点": _mark(running.mode.checkpointing, "训练时 (in training)" if running.mode.checkpointing else None),
        "显存预算": "未知 (unknown)" if budget is None else f"{budget / 2**30:.1f} GB",
    }
    return "🚀 虚拟Blackwell已全局启用\n" + "".join(f"{name + ':':<17}{value}\n" for name, value in lines.items())


def _mark(on: bool, what: str | None = None) -> str:
    return ("✅ 启用" if on else "❌ 禁用") + (f" ({what})" if what else "")


def _switch(
    name: str, device: str | torch.device, levels: dict[str, Any] | None, verbose: bool, **changes: Any
) -> modes.ActiveMode:
    """Turn a mode on, in place of the one that may be on."""
    global _stack
    wanted = modes.mode(name, device=device, **changes)
    disable()
    running = wanted.on()
    if levels is not None:
        _stack = create_vgpu_stack(levels)
    if verbose:
        sys.stdout.write(summary())
    return running
